"""Hugging Face's Trainer with a small BERT under ORTModule: digits as sequences of 64 gray levels.

Needs: pip install transformers accelerate
Usage: python examples/ortmodule/huggingface_trainer.py [--epochs 6]
"""

import argparse
import tempfile

import numpy as np
import torch
from digits import tokens
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from onnxtrain.ortmodule import ORTModule


class Digits(torch.utils.data.Dataset):
    def __init__(self, sequences: torch.Tensor, labels: torch.Tensor) -> None:
        self.sequences, self.labels = sequences, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.sequences[index], "labels": self.labels[index]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    epochs = parser.parse_args().epochs
    torch.manual_seed(0)
    train_x, test_x, train_y, test_y = tokens()
    config = BertConfig(
        vocab_size=17,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
        num_labels=10,
        initializer_range=0.1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = ORTModule(BertForSequenceClassification(config))
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                directory,
                num_train_epochs=epochs,
                per_device_train_batch_size=32,
                learning_rate=2e-3,
                logging_steps=45,
                save_strategy="no",
                report_to=[],
                seed=0,
                use_cpu=True,
            ),
            train_dataset=Digits(train_x, train_y),
            eval_dataset=Digits(test_x, test_y),
            compute_metrics=lambda p: {
                "accuracy": float((np.argmax(p.predictions, -1) == p.label_ids).mean())
            },
        )
        trainer.train()
        print(f"test accuracy {trainer.evaluate()['eval_accuracy']:.4f}")
    print(model.report())


if __name__ == "__main__":
    main()
