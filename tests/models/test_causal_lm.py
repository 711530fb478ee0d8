"""Causal language models: means over tokens, adapters alone in checkpoints, refusals in a sentence."""

import csv
import math
from html import escape
from itertools import product

import pytest
import torch

for module in ("peft", "datasets"):
    pytest.importorskip(module)

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing import event_accumulator
from tiny_llama import LLAMA, ROWS, dataset, make_tokenizer, negative_log_likelihoods
from torch.utils.data import DataLoader

from fl_lightning import (
    ClientEvaluation,
    ConfigurationError,
    FederatedDataModule,
    Federation,
    RunReport,
)
from fl_lightning.data import Completions, NaturalPartition
from fl_lightning.models import CausalLM

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing.*:FutureWarning",  # peft asks for it
)
ADAPTER = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def source(**options):
    given = {"batch_size": 4, "test_fraction": 0.0, "seed": 0, **options}
    return Completions(dataset(), make_tokenizer(), **given)


def ready(made):
    made.prepare_data()
    made.setup("fit")
    return made


def model(**options):
    seed_everything(0, verbose=False)
    network = options.pop("network", LLAMA)
    made = CausalLM(network, adapter=ADAPTER, **options)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:  # as after some training: at 0 adapters do nothing
            torch.nn.init.normal_(parameter, std=0.2)
    return made


def by_hand(module, rows):
    """Return the sum over answers' tokens, their number."""
    examples = [rows[i] for i in range(len(rows))]
    pairs = [
        negative_log_likelihoods(module.network, one["input_ids"], one["labels"] != -100)
        for one in examples
    ]
    return sum(total for total, _ in pairs), sum(count for _, count in pairs)


@pytest.mark.parametrize("options", [{}, {"packing": True}, {"mask_prompts": False}])
def test_means_are_over_tokens_of_all_batches_and_of_each_client(options):
    data = FederatedDataModule(
        source(val_fraction=0.3, **options),  # batches of 4, 4 and 1
        partition=NaturalPartition("user"),
        client_val_fraction=0.4,
        batch_size=2,
        seed=0,
    )
    module, evaluation = model(), ClientEvaluation()
    trainer = Trainer(**QUIET, callbacks=[evaluation])
    [metrics] = trainer.validate(module, datamodule=data, verbose=False)
    total, count = by_hand(module.eval(), data.source.val_set)
    assert metrics["val/loss"] == pytest.approx(total / count, rel=1e-5)
    assert metrics["val/perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)
    for client in range(5):
        total, count = by_hand(
            module, data.source.train_set.select(data.held_out("validation")[client])
        )
        found = evaluation.per_client[client]
        assert found["val/perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)
        assert found["val/loss"] == pytest.approx(total / count, rel=1e-5)
        assert found.keys() == {"val/loss", "val/perplexity"}  # without weights of means


def test_slots_train_adapters_with_eager_attention(tmp_path):
    found = []
    for engine in ("sequential", "slots"):
        module = model(attention="eager")
        fit(module, 1, tmp_path, engine=engine)
        found.append(trained(module))
    torch.testing.assert_close(*found)


GPT2 = {"model_type": "gpt2", "vocab_size": 320, "n_embd": 16, "n_layer": 2, "n_head": 2}
QWEN = {**LLAMA, "model_type": "qwen2", "num_key_value_heads": 1}


@pytest.mark.parametrize("network", [LLAMA, GPT2, QWEN])
def test_padding_and_packing_change_neither_loss_nor_gradient(network):
    module = CausalLM(network).double().eval()
    found = []
    for packing in (False, True):
        rows = ready(source(packing=packing)).train_set
        loss, count = module.loss_of(rows.gather(torch.arange(4)))
        module.zero_grad()
        loss.backward()
        gradients = [p.grad.flatten() for p in module.parameters() if p.grad is not None]
        found.append((loss.detach(), torch.cat(gradients)))
        total, number = by_hand(module, rows.select(torch.arange(4)))
        assert number == count
        assert float(loss.detach()) == pytest.approx(total / number, rel=1e-6)
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-9)


def test_gradient_checkpointing_changes_no_gradient():
    batch = ready(source()).train_set.gather(torch.arange(3))
    found = []
    for checkpointing in (False, True):
        module = model(gradient_checkpointing=checkpointing).double().train()
        module.loss_of(batch)[0].backward()
        found.append([p.grad for p in module.parameters() if p.requires_grad])
    torch.testing.assert_close(*found)


def test_every_example_knows_its_answer_tokens():
    rows = ready(source()).train_set
    found = [int((rows[place]["labels"] != -100).sum()) for place in range(len(rows))]
    assert rows["answer_tokens"].tolist() == found
    data = FederatedDataModule(
        source(), partition=NaturalPartition("user"), update_weight="answer_tokens", seed=0
    )
    totals = [sum(found[place] for place in shard) for shard in data.clients]
    assert data.update_weights.tolist() == totals
    assert rows["prompt"][0].startswith("Where is ")  # for topics


def fit(module, rounds, folder, path=None, **options):
    trainer = Trainer(
        **QUIET,
        max_epochs=rounds,
        callbacks=[Federation(local_epochs=1, seed=0, **options)],
        default_root_dir=folder,
        enable_checkpointing=False,
    )
    data = FederatedDataModule(source(), partition=NaturalPartition("user"), seed=0)
    trainer.fit(module, datamodule=data, ckpt_path=path)
    return trainer


def trained(module):
    return torch.cat([p.detach().flatten() for p in module.parameters() if p.requires_grad])


def test_checkpoints_hold_adapters_alone_and_runs_resume_to_the_bit(tmp_path):
    whole, first, resumed = (model(network={**LLAMA, "hidden_size": 64}) for _ in range(3))
    fit(whole, 3, tmp_path)
    path = tmp_path / "some.ckpt"
    fit(first, 2, tmp_path).save_checkpoint(path)
    fit(resumed, 3, tmp_path, path)
    assert torch.equal(trained(whole), trained(resumed))
    assert not torch.equal(trained(whole), trained(first))
    numbers = sum(p.numel() for p in whole.parameters() if p.requires_grad)
    held = torch.load(path)["state_dict"]
    assert sum(value.numel() for name, value in held.items() if "lora" in name) == numbers
    assert 4 * numbers < path.stat().st_size < 4 * numbers + 50_000

    other = model(network={**LLAMA, "hidden_size": 64}, seed=1)
    with pytest.raises(
        ConfigurationError, match=r"belong to the base LlamaForCausalLM .*model.network"
    ):
        fit(other, 3, tmp_path, path)


def test_tied_weights_of_the_base_are_not_in_checkpoints():
    tied = {**LLAMA, "tie_word_embeddings": True}
    saved, fresh = CausalLM(tied, adapter=ADAPTER), CausalLM(tied, adapter=ADAPTER)
    checkpoint = {"state_dict": saved.state_dict()}
    saved.on_save_checkpoint(checkpoint)
    assert checkpoint["state_dict"]
    assert all("lora_" in name for name in checkpoint["state_dict"])
    fresh.on_load_checkpoint(checkpoint)
    fresh.load_state_dict(checkpoint["state_dict"])


def test_no_a_trains_under_freeze_a_not_even_of_embeddings():
    adapter = {"r": 2, "target_modules": ["embed_tokens", "q_proj"]}
    module = CausalLM(LLAMA, adapter=adapter, freeze_a=True)
    trains = [name for name, p in module.named_parameters() if p.requires_grad]
    assert len(trains) == 1 + LLAMA["num_hidden_layers"]
    assert all("lora_B" in name or "lora_embedding_B" in name for name in trains)


def test_an_exported_adapter_gives_the_same_logits_in_plain_peft(tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = CausalLM(LLAMA).network
    base.save_pretrained(tmp_path / "base")
    module = model(network=str(tmp_path / "base"))
    module.save_adapter(tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    batch = ready(source()).train_set.gather(torch.arange(2))
    inputs = {name: part for name, part in batch.items() if name != "labels"}
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, module.eval()(batch))


def test_an_answer_is_learnt_and_generated():
    module, tokenizer = CausalLM(LLAMA), make_tokenizer()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    rows = ready(source(val_fraction=0.0)).train_set
    for _ in range(60):
        module.loss_of(rows.gather(torch.arange(5)))[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    [*answers] = module.eval().predict_step(rows.gather(torch.arange(2)), 0)
    wanted = [row["completion"] + "</s>" for row in ROWS[:2]]
    assert [tokenizer.decode(answer) for answer in answers] == wanted


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"network": {**LLAMA, "hiden_size": 8}}, ("hiden_size", "did you mean 'hidden_size'")),
            ({"network": {"model_type": "lama"}}, ("model_type 'lama'", "llama")),
            ({"network": "no/such/folder/anywhere"}, ("'no/such/folder/anywhere'",)),
            ({"network": {**LLAMA, "hidden_size": 15}}, ("model.network",)),
            ({"adapter": {"rank": 2}}, ("model.adapter", "'rank' is not accepted by LoraConfig")),
            ({"adapter": {"target_modules": ["query"]}}, ("model.adapter", "query")),
            ({"freeze_a": True}, ("freeze_a", "adapter")),
            ({"four_bit": True}, ("four_bit",)),
        ],
    )
    def test_a_wrong_option_is_named(self, options, words):
        with pytest.raises(ConfigurationError) as caught:
            CausalLM(**{"network": LLAMA, **options})
        for word in words:
            assert word in str(caught.value)


class TestCompletions:
    def test_labels_are_the_completions_tokens(self):
        tokenizer, rows = make_tokenizer(), ready(source(val_fraction=0.0)).train_set
        batch = rows.gather(torch.tensor([0, 1]))
        for labels, row in zip(batch["labels"], ROWS, strict=False):
            assert tokenizer.decode(labels[labels != -100]) == row["completion"] + "</s>"
        assert rows["user"].tolist() == [row["user"] for row in ROWS]

    def test_labels_of_a_conversation_are_the_assistants_messages(self):
        from datasets import Dataset

        said = ["Hi", "Hello", "Where is Oslo?", "In Norway"]
        roles = ["user", "assistant"] * 2
        messages = [{"role": r, "content": s} for r, s in zip(roles, said, strict=True)]
        tokenizer = make_tokenizer()
        rows = ready(
            Completions(
                Dataset.from_list([{"messages": messages}]),
                tokenizer,
                messages="messages",
                val_fraction=0.0,
                test_fraction=0.0,
                seed=0,
            )
        ).train_set
        batch = rows.gather(torch.tensor([0]))
        learnt = batch["labels"][batch["labels"] != -100]
        assert tokenizer.decode(learnt) == "Hello</s>In Norway</s>"
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
        assert tokenizer.decode(batch["input_ids"][0]) == whole

    @pytest.mark.parametrize(
        ("message", "template", "said"),
        [
            ({"content": "Hi"}, None, "example 0: a message must have a role and a content"),
            (
                {"role": "assistant", "content": "Hi"},
                "{{ raise_exception('a user begins') }}",
                "example 0: a user begins",
            ),
        ],
        ids=["no role", "a template that refuses"],
    )
    def test_conversations_that_no_template_accepts_are_named(self, message, template, said):
        from datasets import Dataset

        tokenizer = make_tokenizer()
        tokenizer.chat_template = template or tokenizer.chat_template
        conversations = Dataset.from_list([{"messages": [message]}])
        with pytest.raises(ConfigurationError, match=said):
            ready(Completions(conversations, tokenizer, messages="messages"))

    def test_examples_without_a_label_are_counted(self):
        with (
            pytest.warns(UserWarning, match="30 of 30 examples are left out"),
            pytest.raises(ConfigurationError, match="no training examples"),
        ):
            ready(source(max_length=3))

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"prompt": "question"}, ("no column 'question'", "'prompt'")),
            ({"messages": "prompt"}, ("column prompt, example 0",)),
            ({"messages": "user", "template": None}, ("no chat template", "prompt and completion")),
            ({"tokenizer": "no/such/tokenizer/here"}, ("tokenizer 'no/such/tokenizer/here'",)),
            ({"dataset": "missing.jsonl"}, ("there is no file missing.jsonl",)),
            ({"max_length": 1}, ("max_length must be at least 2",)),
        ],
    )
    def test_what_is_missing_is_named(self, options, words):
        tokenizer = make_tokenizer(options.pop("template", "x"))
        given = {"dataset": dataset(), "tokenizer": tokenizer, **options}
        with pytest.raises(ConfigurationError) as caught:
            ready(Completions(**given))
        for word in words:
            assert word in str(caught.value)


def test_answers_to_prompts_are_in_the_table_the_board_and_the_report(tmp_path):
    prompts = ["a red", "the"]
    data = FederatedDataModule(source(val_fraction=0.3), num_clients=2, seed=0)
    module = model(prompts=prompts)
    logger = TensorBoardLogger(tmp_path, "", "run")
    federation = Federation(local_steps=1, seed=0)
    quiet = {**QUIET, "logger": logger, "enable_checkpointing": False}
    trainer = Trainer(**quiet, callbacks=[federation, RunReport()], max_epochs=2)
    trainer.fit(module, datamodule=data)
    with (tmp_path / "run" / "answers.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["round"], row["prompt"]) for row in rows] == [*product("12", prompts)]
    tokenizer = data.tokenizer
    tokens = tokenizer(f"{tokenizer.bos_token}the", add_special_tokens=False)["input_ids"]
    answer = module.answer(torch.tensor(tokens))
    assert rows[-1]["answer"] == tokenizer.decode(answer, skip_special_tokens=True)
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert f"<td>the</td><td>{escape(rows[-1]['answer'])}</td>" in page
    board = event_accumulator.EventAccumulator(str(tmp_path / "run"))
    board.Reload()
    assert "val/answers/text_summary" in board.Tags()["tensors"]
    answers, losses = board.Tensors("val/answers/text_summary"), board.Scalars("val/loss")
    assert [event.step for event in answers] == [event.step for event in losses] == [0, 1]


def test_prompts_need_a_tokenizer():
    with pytest.raises(ConfigurationError, match="prompts need a data module with a tokenizer"):
        Trainer(**QUIET).validate(model(prompts=["the"]), DataLoader([]), verbose=False)
