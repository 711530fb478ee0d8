"""Answers that people prefer: direct preference optimisation (DPO) of a language model's adapters."""

from functools import partial

import torch
from lightning.pytorch import LightningDataModule, Trainer, seed_everything
from torch.nn.functional import cross_entropy, logsigmoid
from torch.optim import AdamW
from torch.utils.data import Dataset

from fl_lightning import FederatedDataModule, Federation
from fl_lightning.models import CausalLM


class Pairs(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        polite = index % 2
        question = f"{index:02} {'please' if polite else 'do it!'} "
        answers = ("with pleasure", "not right now")[:: 1 if polite else -1]  # preferred first
        tokens = torch.tensor([list(f"{question}{answer}".encode()) for answer in answers])
        labels = tokens.masked_fill(torch.arange(tokens.shape[1]) < len(question), -100)
        return {"input_ids": tokens, "labels": labels}


class Preferences(CausalLM):
    def log_likelihoods(self, batch):  # of both answers, shape (B, 2)
        tokens, labels = (batch[name].flatten(0, 1) for name in ("input_ids", "labels"))
        logits = self({"input_ids": tokens})[:, :-1].transpose(1, 2)
        return -cross_entropy(logits, labels[:, 1:], reduction="none").sum(1).view(-1, 2)

    def margins(
        self, batch
    ):  # log-ratio of the preferred answer to the reference minus the other's
        with torch.no_grad(), self.network.disable_adapter():
            reference = self.log_likelihoods(batch)
        ratios = self.log_likelihoods(batch) - reference
        return ratios[:, 0] - ratios[:, 1]

    def training_step(self, batch, batch_idx):
        return -logsigmoid(0.1 * self.margins(batch)).mean()

    def test_step(self, batch, batch_idx):
        self.log("test/preferred", (self.margins(batch) > 0).float().mean())


seed_everything(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 128}
layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
model = Preferences(
    {"model_type": "llama", **sizes, **layers}, adapter={"r": 4}, optimizer=partial(AdamW, lr=0.01)
)
source = LightningDataModule.from_datasets(Pairs(), test_dataset=Pairs(), batch_size=5)
trainer = Trainer(max_epochs=5, callbacks=[Federation(local_epochs=1)])
trainer.fit(model, datamodule=FederatedDataModule(source, num_clients=10))
trainer.test(model, datamodule=source)
