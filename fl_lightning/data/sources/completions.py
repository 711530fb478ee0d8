"""Data source for training language models: prompts with completions, or conversations.

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

from fl_lightning.data.columns import LABEL_NAMES
from fl_lightning.data.sources.hugging_face import DatasetSource, column
from fl_lightning.data.sources.rows import StoredRows
from fl_lightning.data.sources.source import Loaded

_IGNORED = -100  # label of tokens that are not predicted
ANSWER_TOKENS = "answer_tokens"  # column with the number of labels of each example
Pieces = list[tuple[str, bool]]  # (text, True if its tokens are labels)


class Completions(DatasetSource):
    """Tokenizes prompts with completions, or conversations, to train `fl_lightning.models.CausalLM`.

    All columns can be used for partitions. A further column, ``answer_tokens``, is the number of tokens of each example that the loss counts.

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

    @override
    def load(self) -> Loaded:
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
            except (
                Exception
            ) as error:  # of the template, which may refuse an order of roles, or the tokenizer
                raise self._error(
                    f"column {', '.join(self._texts)}, example {number}: {error}"
                ) from error
            examples.append(_encoded(tokenizer, pieces, self._max_length, self._mask_prompts))
        kept = [place for place, (_, labels) in enumerate(examples) if (labels != _IGNORED).any()]
        if len(kept) < len(examples):
            rank_zero_warn(
                f"Completions: {len(examples) - len(kept)} of {len(examples)} examples are left out, because "
                f"the loss counts none of their first {self._max_length} tokens (max_length)"
            )
        padding = (
            tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        )
        # a column of texts is no label, even if it has the name of one
        names = [n for n in split.column_names if n not in LABEL_NAMES or n not in self._texts]
        columns: dict[str, Any] = {name: partial(column, split, name) for name in names}
        columns[ANSWER_TOKENS] = [int((labels != _IGNORED).sum()) for _, labels in examples]
        rows = TokenRows(examples, columns, padding=int(padding), packing=self._packing)
        return rows.select(torch.tensor(kept, dtype=torch.long))


def _completion(tokenizer: Any, prompt: Any, completion: Any) -> Pieces:
    for text in (prompt, completion):
        if not isinstance(text, str):
            raise TypeError(f"it must be a text, got {text!r}")
    if tokenizer.eos_token is None:
        raise ValueError(
            "the tokenizer has no eos_token, which ends a completion: set tokenizer.eos_token"
        )
    return [
        (f"{tokenizer.bos_token or ''}{prompt}", False),
        (completion + tokenizer.eos_token, True),
    ]


def _conversation(tokenizer: Any, messages: Any) -> Pieces:
    """Apply the chat template to a conversation, and split its text at the assistant's messages.

    Raises:
        TypeError: if a message has no role or content.
        ValueError: if there is no chat template, or if the template changes the text of a message when
            more messages follow.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(
            "the tokenizer has no chat template: use the tokenizer of a chat model, set "
            "tokenizer.chat_template, or give the columns prompt and completion"
        )
    for message in messages:
        if not (isinstance(message, Mapping) and {"role", "content"} <= message.keys()):
            raise TypeError(f"a message must have a role and a content, got {message!r}")
    pieces: Pieces = []
    written = ""
    for before, after in _turns(tokenizer, messages):
        if not (before.startswith(written) and after.startswith(before)):
            raise ValueError(
                "the chat template changes the text of earlier messages when more follow, so that the "
                "assistant's messages cannot be found in the text: give prompt and completion instead"
            )
        pieces += [(before[len(written) :], False), (after[len(before) :], True)]
        written = after
    return pieces


def _turns(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield, for each assistant message, the conversation's text before the message and the text including it."""
    write = partial(tokenizer.apply_chat_template, tokenize=False)
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            earlier = list(messages[:place])
            before = write(earlier, add_generation_prompt=True) if earlier else ""
            yield before, write(list(messages[: place + 1]))


def _encoded(
    tokenizer: Any, pieces: Pieces, max_length: int, mask_prompts: bool
) -> tuple[Tensor, Tensor]:
    """Tokenize the pieces of one example, and return its tokens and labels, both int32 of shape (L,).

    Each piece is tokenized separately, so that a prompt has the same tokens as in generation.
    """
    tokens: list[int] = []
    labels: list[int] = []
    for text, is_answer in pieces:
        some = tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens += some
        labels += some if is_answer or not mask_prompts else [_IGNORED] * len(some)
    labels[:1] = [_IGNORED]  # the first token of an example is not predicted
    kept = torch.tensor([tokens, labels], dtype=torch.int32)[:, :max_length]
    return kept[0], kept[1]


@final
class TokenRows(StoredRows):
    """Data set of tokenized examples in memory, which pads or packs their different lengths in a batch.

    Args:
        examples: tokens and labels of each example, int32 of shape (L,).
        columns: see `StoredRows`.
        padding: token id that pads the rows of a batch to one length.
        packing: whether a batch is one row without padding.

    Example:
        >>> short = torch.tensor([1, 5, 2]), torch.tensor([-100, 5, 2])
        >>> long = torch.tensor([1, 6, 7, 2]), torch.tensor([-100, -100, 7, 2])
        >>> TokenRows([short, long], padding=0).gather(torch.tensor([0, 1]))["labels"]
        tensor([[-100,    5,    2, -100],
                [-100, -100,    7,    2]])
        >>> TokenRows([short, long], padding=0, packing=True)[[0, 1]]["position_ids"]
        tensor([[0, 1, 2, 0, 1, 2, 3]])
    """

    def __init__(
        self,
        examples: Sequence[tuple[Tensor, Tensor]],
        columns: Mapping[str, Any] | None = None,
        *,
        padding: int,
        packing: bool = False,
    ) -> None:
        super().__init__(len(examples), columns)
        self._examples, self._padding, self._packing = examples, padding, packing

    @override
    def read(self, places: Tensor) -> dict[str, Tensor]:
        examples = [self._examples[place] for place in places.tolist()]
        tokens, labels = ([part.long() for part in parts] for parts in zip(*examples, strict=True))
        if self._packing:
            positions = torch.cat([torch.arange(len(some)) for some in tokens])
            parts = {"input_ids": torch.cat(tokens), "position_ids": positions}
            parts["labels"] = torch.cat(labels)
            return {name: part[None] for name, part in parts.items()}
        ones = [torch.ones_like(some) for some in tokens]
        padded = partial(pad_sequence, batch_first=True)
        return {
            "input_ids": padded(tokens, padding_value=self._padding),
            "attention_mask": padded(ones),
            "labels": padded(labels, padding_value=_IGNORED),
        }
