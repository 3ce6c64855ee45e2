"""A small language model, what retraining it gives, and how near the estimates come."""
