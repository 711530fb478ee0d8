"""Causal language models of Hugging Face, whole or with adapters, trained on the tokens of answers.

    loss = Σ_(t with a label) -log p(x_t | x_<t) / number of labels      of a batch
    perplexity = exp(Σ -log p / Σ labels)        over all batches, of all clients or of one

Means are over tokens: batches and clients are weighted by their number of labels, so that batch size, padding
and packing do not change metrics. Perplexity is the exponential of a mean, not a mean of exponentials. Clients'
updates are weighted by examples, as for other models, or with ``update_weight: answer_tokens`` of
`FederatedDataModule` by the labels of their examples; see `fl_lightning.server.Mean`.

Adapters: W + s B A with A of shape (r, in) and B of shape (out, r), s = alpha / r (LoRA, Hu et al. 2022), or
alpha / √r (rsLoRA, Kalajdzievski 2023), or with a magnitude per column (DoRA, Liu et al. 2024). B begins at 0.
With ``freeze_a`` only B trains (FFA-LoRA, Sun et al. 2024, "Improving LoRA in Privacy-preserving Federated
Learning"): then the mean of clients' products B A is the product of their mean.

Checkpoints contain adapters and other trainable parameters, but of the frozen base only a name and a hash; to
load one with another base is an error.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import Metric

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.models.networks import add_adapters, build_causal_lm, freeze_a_factors
from fl_lightning.models.schedule import Schedule, scheduled

IGNORED = -100  # label of tokens that are not predicted
ANSWERS = "answers.csv"  # file in a run's folder with answers to prompts, after every validation
_BASE = "frozen_base"  # key of the base's name and hash in checkpoints
_Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class Perplexity(Metric):
    """Metric: perplexity, the exponential of the mean negative log-likelihood per token.

    Example:
        >>> perplexity = Perplexity()
        >>> perplexity.update(torch.tensor(0.0), torch.tensor(3))
        >>> perplexity.update(torch.tensor(4.0), torch.tensor(1))
        >>> perplexity.compute()  # exp(4 / 4), and not (1 + exp(4)) / 2
        tensor(2.7183)
    """

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, loss: Tensor, count: Tensor) -> None:
        """Add a batch: its mean loss over ``count`` tokens."""
        self.total += loss * count
        self.count += count

    def compute(self) -> Tensor:
        """Return the perplexity over all tokens added so far."""
        return (self.total / self.count).exp()


class CausalLM(LightningModule):
    """Lightning module for causal language models of transformers, with optional adapters such as LoRA.

    A batch is a dict as that of `fl_lightning.data.Completions`: ``input_ids`` and ``labels``, shape (B, L); a
    label of -100 is not predicted. ``attention_mask``, or a packed batch's ``position_ids``, goes to the model.

    Args:
        network: a name on the hub or a folder; or a configuration with a ``model_type``, e.g.
            ``{model_type: llama, hidden_size: 64}``, for random weights; in Python also a model.
        adapter: options of `peft.LoraConfig`, e.g. ``{r: 8, use_dora: true}``, in Python also any
            configuration of peft; None trains the whole model. Without ``target_modules`` all linear
            layers but the last get adapters.
        freeze_a: train only B of each adapter (FFA-LoRA).
        four_bit: load the base in 4 bits (NF4 of QLoRA), with bitsandbytes.
        dtype: data type of the base; ``auto`` is that of the saved weights. Adapters are in float32.
        attention: implementation of attention in transformers, e.g. ``eager``, with which clients can
            train in slots; None is the library's choice. For networks by name or configuration.
        gradient_checkpointing: recompute activations in the backward pass instead of storing them.
        prompts: texts whose answers are written after every validation to ``answers.csv`` beside the
            logs, to TensorBoard and to the report. The data module must have a ``tokenizer``.
        seed: seed of the random weights of a configuration.
        optimizer: makes the optimizer of the trainable parameters; AdamW with rate 2e-4 and no decay if
            None.
        schedule: schedule of the learning rate over rounds; constant if None.

    Raises:
        ConfigurationError: if transformers or peft rejects an option, or is not installed.

    Example:
        >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 16}
        >>> layers = {"num_hidden_layers": 1, "num_attention_heads": 2}
        >>> model = CausalLM({"model_type": "llama", **sizes, **layers}, adapter={"r": 2})
        >>> tokens = torch.tensor([[1, 2, 3]])
        >>> model({"input_ids": tokens, "labels": tokens}).shape
        torch.Size([1, 3, 16])
        >>> sum(p.numel() for p in model.parameters() if p.requires_grad)
        224
    """

    def __init__(
        self,
        network: str | dict[str, Any] | nn.Module,
        *,
        adapter: dict[str, Any] | Any | None = None,
        freeze_a: bool = False,
        four_bit: bool = False,
        dtype: _Dtype = "auto",
        attention: str | None = None,
        gradient_checkpointing: bool = False,
        prompts: list[str] | None = None,
        seed: int = 0,
        optimizer: OptimizerCallable | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        super().__init__()
        if freeze_a and adapter is None:
            raise ConfigurationError(
                "model.freeze_a is for adapters, and model.adapter is not set: set it, e.g. to {r: 8}"
            )
        base: Any = build_causal_lm(network, four_bit, dtype, attention, seed)
        self.base_name = network if isinstance(network, str) else type(base).__name__
        originals = {id(parameter) for parameter in base.parameters()}
        if gradient_checkpointing:
            # transformers before 5.24 has the second name alone
            enable = getattr(base, "activation_checkpointing_enable", None)
            (enable or base.gradient_checkpointing_enable)({"use_reentrant": False})
            base.enable_input_require_grads()  # the embeddings may be frozen
        self.network = base if adapter is None else add_adapters(base, adapter)
        if freeze_a:
            freeze_a_factors(self.network)
        self._frozen = {
            name
            for name, parameter in self.named_parameters(remove_duplicate=False)  # tied weights too
            if id(parameter) in originals and not parameter.requires_grad
        }
        self._changed: set[str] = set()
        self._prompts = list(prompts or [])
        self._optimizer = optimizer or partial(torch.optim.AdamW, lr=2e-4, weight_decay=0.0)
        self._schedule = schedule
        self.perplexities = nn.ModuleDict({s: Perplexity() for s in ("fit", "val", "test")})

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the logits of the next token at each position, shape (B, L, vocabulary)."""
        inputs = {name: part for name, part in batch.items() if name != "labels"}
        logits: Tensor = self.network(**inputs, use_cache=False).logits
        return logits

    def loss_of(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return a batch's mean loss over label tokens (0 if there are none), and the number of these tokens."""
        labels = batch["labels"][:, 1:].flatten()
        logits = self(batch)[:, :-1].flatten(0, 1).float()
        total = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        count = (labels != IGNORED).sum()
        return total / count.clamp(min=1), count

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """Return a batch's mean loss over its label tokens, and log ``train/perplexity``."""
        loss, count = self.loss_of(batch)
        perplexity: Any = self.perplexities["fit"]
        perplexity.update(loss.detach(), count)
        self.log("train/perplexity", perplexity, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        """Log val/loss and val/perplexity."""
        self._evaluate("val", batch)

    def test_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        """Log test/loss and test/perplexity."""
        self._evaluate("test", batch)

    def _evaluate(self, stage: str, batch: Mapping[str, Tensor]) -> None:
        loss, count = self.loss_of(batch)
        perplexity: Any = self.perplexities[stage]
        perplexity.update(loss, count)
        values = {f"{stage}/loss": loss, f"{stage}/perplexity": perplexity}
        self.log_dict(values, prog_bar=True, batch_size=int(count), sync_dist=True)

    def setup(self, stage: str) -> None:
        """Raise ConfigurationError if there are prompts but the data module has no tokenizer."""
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        if self._prompts and getattr(data, "tokenizer", None) is None:
            raise ConfigurationError(
                "model.prompts need a data module with a tokenizer, such as that of Completions: leave them out, or "
                "give the data module an attribute tokenizer"
            )

    def on_validation_end(self) -> None:
        """Write the model's answers to the option ``prompts`` into ``answers.csv`` and to TensorBoard."""
        # a collective operation: every process must read log_dir
        folder = self.trainer.log_dir if self._prompts and self.loggers else None
        if folder is None or self.trainer.sanity_checking or not self.trainer.is_global_zero:
            return
        tokenizer = self.trainer.datamodule.tokenizer  # type: ignore[attr-defined]
        rows = []
        for prompt in self._prompts:
            text = f"{tokenizer.bos_token or ''}{prompt}"
            tokens = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
            answer = self.answer(tokens.to(self.device))
            rows.append([prompt, tokenizer.decode(answer, skip_special_tokens=True)])
        path = Path(folder, ANSWERS)
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerows([["round", "prompt", "answer"]] * is_new)
            table.writerows([self.current_epoch + 1, *row] for row in rows)
        # as Lightning logs the metrics of a validation: in a fit the step has been counted already
        step = self.global_step - (self.trainer.state.fn == "fit")
        shown = "\n\n".join(f"**{prompt}** {answer}" for prompt, answer in rows)
        for logger in self.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("val/answers", shown, step)

    def predict_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> list[Tensor]:
        """Return the model's greedy continuations of a batch's prompts, each at most 64 tokens."""
        return [self.answer(prompt) for prompt in prompts_of(batch)]

    def answer(self, prompt: Tensor, max_new_tokens: int = 64) -> Tensor:
        """Return the greedy continuation (always the likeliest token) of a prompt's tokens, shape (L,)."""
        options = {"max_new_tokens": max_new_tokens, "do_sample": False, "use_cache": True}
        with torch.no_grad():
            whole: Tensor = self.network.generate(  # type: ignore[operator]
                input_ids=prompt[None], attention_mask=torch.ones_like(prompt)[None], **options
            )
        return whole[0, len(prompt) :]

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer of the trainable parameters, with the learning-rate schedule if one is set."""
        return scheduled(self, self._optimizer, self._schedule)

    def save_adapter(self, folder: str) -> None:
        """Save the adapters into a folder, from which `peft.PeftModel.from_pretrained` can load them.

        Raises:
            ConfigurationError: if there are no adapters, or the aggregator has changed the base.
        """
        if not hasattr(self.network, "peft_config"):
            raise ConfigurationError(
                "export --adapter: the model has no adapters (model.adapter is not set)"
            )
        if self._changed:
            raise ConfigurationError(
                "export --adapter: the aggregator has changed the base's weights, so that the adapters alone "
                "are not the model: use save_pretrained of network.merge_and_unload()"
            )
        self.network.save_pretrained(folder)  # type: ignore[operator]

    @cached_property
    def base_hash(self) -> str:
        """Hash of the frozen base model (its parameters' names and values), as it was on first access."""
        digest = hashlib.blake2b(digest_size=16)
        parameters = dict(self.named_parameters(remove_duplicate=False))
        for name in sorted(self._frozen):
            numbers = parameters[name].detach().cpu().contiguous()
            digest.update(f"{name} {tuple(numbers.shape)} {numbers.dtype}".encode())
            digest.update(numbers.view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def will_change(self, names: Iterable[str]) -> None:
        """Record which frozen weights an aggregator is going to change, so that checkpoints include them."""
        _ = self.base_hash  # computed before the change
        self._changed |= self._frozen & set(names)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave the frozen base model out of a checkpoint, which gets its name and hash instead."""
        if not self._frozen:
            return
        left_out = self._frozen - self._changed
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {n: value for n, value in state.items() if n not in left_out}
        checkpoint[_BASE] = {"name": self.base_name, "hash": self.base_hash}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the frozen base model's weights, which a checkpoint does not contain, to a loaded checkpoint.

        Raises:
            ConfigurationError: if the checkpoint was trained on another base.
        """
        saved = checkpoint.get(_BASE)
        if saved is None:
            return
        if saved["hash"] != self.base_hash:
            raise ConfigurationError(
                f"the checkpoint's adapters belong to the base {saved['name']} with hash "
                f"{saved['hash'][:12]}…, and model.network, {self.base_name}, has {self.base_hash[:12]}…: "
                "give the base (and dtype, four_bit, seed) of the run that wrote it"
            )
        state = checkpoint["state_dict"]
        self._changed = self._frozen & state.keys()
        own = dict(self.named_parameters(remove_duplicate=False))
        missing = {name: own[name].detach() for name in self._frozen - state.keys()}
        checkpoint["state_dict"] = {**state, **missing}


def prompts_of(batch: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the prompt of each example of a batch: its tokens before the first label.

    Example:
        >>> tokens = torch.tensor([[5, 6, 7, 8], [5, 7, 0, 0]])
        >>> labels = torch.tensor([[-100, -100, 7, 8], [-100, 7, -100, -100]])
        >>> prompts_of({"input_ids": tokens, "labels": labels})
        [tensor([5, 6]), tensor([5])]
    """
    tokens, labels = batch["input_ids"], batch["labels"]
    if "position_ids" in batch:  # packed: a row per example
        starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
        ends = [*starts[1:], tokens.shape[1]]
        rows = [(tokens[0, a:b], labels[0, a:b]) for a, b in zip(starts, ends, strict=True)]
    else:
        rows = list(zip(tokens, labels, strict=True))
    return [row[: int((label != IGNORED).int().argmax())] for row, label in rows]
