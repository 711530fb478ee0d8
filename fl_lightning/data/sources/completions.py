"""Data source of texts to generate: prompts with completions, or conversations, as tokens with labels.

    prompt, completion     prompt's tokens | completion's tokens, end of text       labels on the right part
    messages               the tokenizer's chat template, message by message        labels on the assistant's

A batch is padded to its longest example. A packed batch is one row without padding, whose ``position_ids``
restart at every example: models of transformers then do not attend across examples, so that the loss is the
same. A batch has examples of only one client.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import override

from fl_lightning.data.sources.hugging_face import DatasetSource, column
from fl_lightning.data.sources.rows import MemoryRows
from fl_lightning.data.sources.source import Loaded

_IGNORED = -100  # label of tokens that are not predicted
Pieces = list[tuple[str, bool]]  # (text, True if its tokens are labels)


class Completions(DatasetSource):
    """Texts to generate, for `fl_lightning.models.CausalLM`; other columns can be used for partitions.

    Args:
        dataset: see `DatasetSource`.
        tokenizer: name or folder of the tokenizer, or in Python the tokenizer itself.
        prompt: column of prompts.
        completion: column of completions.
        messages: column of conversations, instead of prompts and completions: lists of
            ``{role: …, content: …}``, to which the tokenizer's chat template is applied.
        mask_prompts: whether the loss counts only completions, or the assistant's messages; False counts
            all tokens.
        packing: concatenate the examples of a batch into one row instead of padding them.
        max_length: largest number of tokens of an example; longer examples are truncated at the end.
            Examples without a label in that length are left out, and a warning says how many.
        batch_size: examples per batch; the last batch of a pass may be smaller.
        test_fraction: fraction of the training examples held out for the test, in [0, 1).
        options: those of `DatasetSource`.

    Raises:
        ConfigurationError: if a setting is out of range; at `setup` if a data set, split or column is
            missing, or the chat template cannot be applied.
    """

    def __init__(
        self,
        dataset: Any,
        tokenizer: Any,
        *,
        prompt: str = "prompt",
        completion: str = "completion",
        messages: str | None = None,
        mask_prompts: bool = True,
        packing: bool = False,
        max_length: int = 512,
        batch_size: int = 8,
        test_fraction: float = 0.1,
        **options: Any,
    ) -> None:
        self._texts = [prompt, completion] if messages is None else [messages]
        self._mask_prompts, self._packing, self._max_length = mask_prompts, packing, max_length
        super().__init__(
            dataset,
            tokenizer=tokenizer,
            batch_size=batch_size,
            test_fraction=test_fraction,
            **options,
        )

    @override
    def issues(self) -> Iterator[str]:
        if self._max_length < 2:
            yield f"max_length must be at least 2 tokens, got {self._max_length}"

    def load(self) -> Loaded:
        """Read and tokenize the splits.

        Raises:
            ConfigurationError: if a data set, split or column is missing, or the chat template cannot be
                applied.
        """
        splits = self.splits(self._texts)
        rows = {purpose: self._rows(split) for purpose, split in splits.items()}
        return Loaded(rows["train"], rows.get("val"), rows.get("test"))

    def _rows(self, split: Any) -> TokenRows:
        tokenizer, texts = self.tokenizer, [column(split, name) for name in self._texts]
        write = _conversation if len(self._texts) == 1 else _completion
        examples = []
        for number, values in enumerate(zip(*texts, strict=True)):
            try:
                pieces = write(tokenizer, *values)
            except (TypeError, ValueError, KeyError) as error:
                raise self._error(
                    f"column {', '.join(self._texts)}, example {number}: {error}"
                ) from error
            examples.append(_encoded(tokenizer, pieces, self._max_length, self._mask_prompts))
        kept = [place for place, (_, labels) in enumerate(examples) if any(labels[1:])]
        if len(kept) < len(examples):
            rank_zero_warn(
                f"Completions: {len(examples) - len(kept)} of {len(examples)} examples are left out: no token "
                f"to learn is among their first {self._max_length} (max_length)"
            )
        names = (name for name in split.column_names if name not in self._texts)
        columns = {name: partial(column, split, name) for name in names}
        padding = (
            tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        )
        return TokenRows(
            [torch.tensor(examples[place][0], dtype=torch.int32) for place in kept],
            [torch.tensor(examples[place][1], dtype=torch.bool) for place in kept],
            columns,
            padding=int(padding),
            packing=self._packing,
            places=torch.tensor(kept, dtype=torch.long),
        )


def _completion(tokenizer: Any, prompt: Any, completion: Any) -> Pieces:
    for text in (prompt, completion):
        if not isinstance(text, str):
            raise TypeError(f"a text is expected, got {text!r}")
    if tokenizer.eos_token is None:
        raise ValueError("the tokenizer has no eos_token, which ends a completion: set one")
    return [
        (f"{tokenizer.bos_token or ''}{prompt}", False),
        (completion + tokenizer.eos_token, True),
    ]


def _conversation(tokenizer: Any, messages: Any) -> Pieces:
    """Apply the chat template to a conversation, turn by turn.

    Raises:
        ValueError: if there is no chat template, or later messages change its text for earlier ones, so
            that the assistant's messages cannot be found in the text.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(
            "the tokenizer has no chat template: take that of a chat model, set tokenizer.chat_template, or "
            "give the columns prompt and completion"
        )
    pieces: Pieces = []
    written = ""
    for before, after in _turns(tokenizer, messages):
        if not (before.startswith(written) and after.startswith(before)):
            raise ValueError(
                "the chat template changes the text of earlier messages when more follow, so that the "
                "assistant's messages cannot be found in it: give prompt and completion"
            )
        pieces += [(before[len(written) :], False), (after[len(before) :], True)]
        written = after
    return pieces


def _turns(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the text before and after each of the assistant's messages, up to the last one."""
    write = partial(tokenizer.apply_chat_template, tokenize=False)
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            earlier = list(messages[:place])
            before = write(earlier, add_generation_prompt=True) if earlier else ""
            yield before, write(list(messages[: place + 1]))


def _encoded(
    tokenizer: Any, pieces: Pieces, max_length: int, mask_prompts: bool
) -> tuple[list[int], list[bool]]:
    """Tokens of an example, and True for each token that is a label.

    Each piece is tokenized separately, so that a prompt has the same tokens as in generation.
    """
    tokens: list[int] = []
    learnt: list[bool] = []
    for text, is_answer in pieces:
        some = tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens += some
        learnt += [is_answer or not mask_prompts] * len(some)
    return tokens[:max_length], learnt[:max_length]


@final
class TokenRows(MemoryRows):
    """Tokenized examples of different lengths, in memory.

    Args:
        tokens: tokens of each example, int32 of shape (L,).
        learnt: True for tokens that are labels, bool of shape (L,) for each example.
        columns: see `MemoryRows`.
        padding: token that pads the rows of a batch.
        packing: whether a batch is one row without padding.
        places: see `MemoryRows`.

    Example:
        >>> tokens = [torch.tensor([1, 5, 2]), torch.tensor([1, 6, 7, 2])]
        >>> learnt = [torch.tensor([0, 1, 1]) > 0, torch.tensor([0, 0, 1, 1]) > 0]
        >>> TokenRows(tokens, learnt, padding=0).gather(torch.tensor([0, 1]))["labels"]
        tensor([[-100,    5,    2, -100],
                [-100, -100,    7,    2]])
        >>> TokenRows(tokens, learnt, padding=0, packing=True).gather(torch.tensor([0, 1]))["position_ids"]
        tensor([[0, 1, 2, 0, 1, 2, 3]])
    """

    def __init__(
        self,
        tokens: Sequence[Tensor],
        learnt: Sequence[Tensor],
        columns: Mapping[str, Any] | None = None,
        *,
        padding: int,
        packing: bool = False,
        places: Tensor | None = None,
    ) -> None:
        super().__init__(columns, places)
        self._tokens, self._learnt = list(tokens), list(learnt)
        self._padding, self._packing = padding, packing

    def __len__(self) -> int:
        return len(self._tokens)

    def gather(self, indices: Tensor) -> dict[str, Tensor]:
        """Return a batch of the rows at ``indices``, shape (B,): tokens and labels, int64."""
        chosen = indices.tolist()
        tokens = [self._tokens[place].long() for place in chosen]
        labels = [
            some.masked_fill(~self._learnt[place], _IGNORED)
            for some, place in zip(tokens, chosen, strict=True)
        ]
        for some in labels:
            some[0] = _IGNORED  # the first token of an example is not predicted
        if self._packing:
            positions = torch.cat([torch.arange(len(some)) for some in tokens])
            parts = {"input_ids": torch.cat(tokens), "position_ids": positions}
            return {
                name: part[None] for name, part in {**parts, "labels": torch.cat(labels)}.items()
            }
        return {
            "input_ids": pad_sequence(tokens, batch_first=True, padding_value=self._padding),
            "attention_mask": pad_sequence(
                [torch.ones_like(some) for some in tokens], batch_first=True
            ),
            "labels": pad_sequence(labels, batch_first=True, padding_value=_IGNORED),
        }

    def select(self, indices: Tensor) -> TokenRows:
        """Return these rows only, in this order."""
        chosen = indices.tolist()
        return TokenRows(
            [self._tokens[place] for place in chosen],
            [self._learnt[place] for place in chosen],
            self._columns,
            padding=self._padding,
            packing=self._packing,
            places=self._chosen(indices),
        )
