"""Models as people train them, what retraining them gives, and how near the estimates come."""
