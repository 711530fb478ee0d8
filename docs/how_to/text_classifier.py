"""Reviews by ten users, a transformer of Hugging Face with LoRA: only adapters and head travel."""

from datasets import Dataset
from lightning.pytorch import LightningModule, Trainer, seed_everything
from peft import LoraConfig, get_peft_model
from torch.optim import AdamW
from transformers import BertConfig, BertForSequenceClassification, ByT5Tokenizer

from fl_lightning import FederatedDataModule, Federation
from fl_lightning.data import HuggingFace, NaturalPartition

praise = {"good": 1, "great": 1, "fun": 1, "bad": 0, "dull": 0, "tedious": 0}
rows = [{"text": w, "praise": praise[w], "user": k} for k in range(10) for w in [*praise] * 3]


class Reviewer(LightningModule):
    def __init__(self):
        super().__init__()
        sizes = BertConfig(vocab_size=384, hidden_size=32, num_attention_heads=2)
        lora = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"])
        self.network = get_peft_model(BertForSequenceClassification(sizes), lora)

    def training_step(self, batch, batch_idx):
        return self.network(**batch).loss

    def test_step(self, batch, batch_idx):
        right = self.network(**batch).logits.argmax(1) == batch["labels"]
        self.log("test/accuracy", right.float().mean())

    def configure_optimizers(self):
        return AdamW([p for p in self.parameters() if p.requires_grad], lr=0.02)


seed_everything(0)
tokens = ByT5Tokenizer()  # reviews and tokenizer can also be names on the hub
source = HuggingFace(Dataset.from_list(rows), "praise", text="text", tokenizer=tokens)
data = FederatedDataModule(source, partition=NaturalPartition("user"))
trainer = Trainer(max_epochs=10, callbacks=[Federation(local_epochs=1)])
trainer.fit(Reviewer(), datamodule=data)
trainer.test(datamodule=data)
