"""Fine-tune a classifier of sentences, as such scripts are written: nothing here knows of IVON."""

import sys

import datasets
import transformers
from transformers import Trainer


def main(arguments: list[str]) -> Trainer:
    checkpoint, file, *rest = arguments
    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    parser.set_defaults(learning_rate=5e-5, weight_decay=0.01)
    (args,) = parser.parse_args_into_dataclasses(rest)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(checkpoint)
    raw = datasets.load_dataset("csv", data_files=file, split="train")
    data = raw.map(lambda rows: tokenizer(rows["sentence"], truncation=True), batched=True)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data,
        eval_dataset=data,
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main(sys.argv[1:])
