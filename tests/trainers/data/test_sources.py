"""Data sets from files, directories and the hub, alone and mixed by weight."""

import json
from collections import Counter
from datetime import date

import pytest

from rl_consistency.trainers.config.data_sections import DataSection
from rl_consistency.trainers.data import sources
from rl_consistency.trainers.data.examples import DataError, DataOrder, examples_of, mix_counts
from rl_consistency.trainers.data.prompts import PromptSet, load_prompts
from rl_consistency.trainers.data.sources import read_rows
from rl_consistency.trainers.data.tokenizer import byte_tokenizer
from rl_consistency.trainers.run_directory.checkpoint import CheckpointError
from rl_consistency.trainers.run_directory.inputs import data_digests
from tests.trainers.conftest import TinyRun

ROWS = [{"question": f"{n}+1=", "answer": n + 1, "level": n % 3} for n in range(6)]
MESSAGES = [{"role": "user", "content": "1+1"}]


def read(**given):
    (source,) = DataSection(**given).train_sources
    rows, commit = read_rows(source)
    fields = source.model_dump(include={"prompt_field", "answer_field"})
    return examples_of(rows, **fields, conversations=True), commit


def written(tmp_path, kind, rows=ROWS):
    """A file or directory of this kind that holds the rows."""
    path = tmp_path / f"data.{kind}"
    if kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "csv":
        lines = ["question,answer,level", *(",".join(map(str, row.values())) for row in rows)]
        path.write_text("\n".join(lines) + "\n")
    else:
        datasets = pytest.importorskip("datasets", reason="datasets is an optional extra")
        dataset = datasets.Dataset.from_list(rows)
        if kind == "parquet":
            dataset.to_parquet(path)
        elif kind == "saved":
            dataset.save_to_disk(path)
        elif kind == "splits":
            datasets.DatasetDict({"train": dataset, "test": dataset.select([0])}).save_to_disk(path)
        else:
            path.mkdir()
            dataset.to_parquet(path / "train-00000.parquet")
    return path


KINDS = ["json", "jsonl", "csv", "parquet", "saved", "splits", "folder"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_gives_the_same_examples(tmp_path, kind):
    path = written(tmp_path, kind)
    found, commit = read(path=str(path))
    assert [e.prompt for e in found] == [row["question"] for row in ROWS]
    assert [e.answer for e in found] == [str(row["answer"]) for row in ROWS]
    assert [int(e.extra["level"]) for e in found] == [row["level"] for row in ROWS]
    number = 4 if kind == "csv" else 3
    assert str(path) in found[2].place and found[2].place.endswith(str(number))
    assert commit is None
    assert [e.id for e in read(path=str(path), limit=2)[0]] == [0, 1]


def test_the_evaluation_split_of_a_directory_is_read(tmp_path):
    path = written(tmp_path, "splits")
    (source,) = DataSection(path=str(path), eval_split="test").evaluation_sources.values()
    assert len(list(read_rows(source)[0])) == 1
    named = DataSection(path=str(path), eval_sets={"mine": {"path": str(path)}}).evaluation_sources
    assert list(named) == ["mine"] and len(list(read_rows(named["mine"])[0])) == 1


@pytest.mark.parametrize("kind", ["csv", "json", "jsonl", "parquet"])
def test_the_case_of_a_suffix_does_not_matter(tmp_path, kind):
    lower = written(tmp_path, kind)
    upper = lower.rename(lower.with_suffix(lower.suffix.upper()))
    assert [e.prompt for e in read(path=str(upper))[0]] == [row["question"] for row in ROWS]


def test_a_column_of_csv_that_stands_twice_is_named(tmp_path):
    (tmp_path / "a.csv").write_text("question,answer,answer\n1+1=,2,3\n")
    with pytest.raises(DataError, match=r"a\.csv: the field answer stands more than once"):
        read(path=str(tmp_path / "a.csv"))


def test_fields_of_csv_are_text_as_they_stand(tmp_path):
    (tmp_path / "a.csv").write_text('question,answer\n"a,\nb",007\nNA,1.50\n')
    found, _ = read(path=str(tmp_path / "a.csv"))
    assert [(e.prompt, e.answer) for e in found] == [("a,\nb", "007"), ("NA", "1.50")]


def test_answers_may_be_numbers_absent_or_inside_of_objects(tmp_path):
    rows = [{"prompt": MESSAGES, "reward_model": {"ground_truth": 1.5}, "on": date(2026, 1, 2)}]
    path = str(written(tmp_path, "parquet", rows))
    given = {"path": path, "prompt_field": "prompt", "chat_template": True}
    ((example,), _) = read(**given, answer_field="reward_model.ground_truth")
    assert example.answer == "1.5" and list(example.messages) == MESSAGES
    ((example,), _) = read(**given, answer_field=None)
    assert example.answer == "" and set(example.extra) == {"reward_model", "on"}
    with pytest.raises(DataError, match=r"no field 'answer'.*null: there are no answers"):
        read(**given)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "question,answer\n1\n", "line 2: it must have the 2 fields"),
        ("a.csv", "question,answer\n1,2,3\n", "line 2: it must have the 2 fields"),
        ("a.csv", 'question,answer\n"1,2\n', "cannot be read as CSV"),
        ("a.json", "[1]", "item 1: an object is needed"),
        ("a.json", "[{]", "not JSON"),
        ("a.parquet", "PAR1", "cannot read the data"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message) as error:
        read(path=str(tmp_path / name))
    assert name in str(error.value)


def test_a_file_has_no_split(tmp_path):
    with pytest.raises(DataError, match="a file, which has no split: leave it out"):
        read(path=str(written(tmp_path, "jsonl")), split="train")


def test_an_unknown_split_is_told_with_the_known_ones(tmp_path):
    with pytest.raises(DataError, match="no split dev: give one of train, test"):
        read(path=str(written(tmp_path, "splits")), split="dev")


def test_a_column_of_images_is_refused(tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets is an optional extra")
    rows = datasets.Dataset.from_dict({"question": ["a"], "answer": ["b"], "image": [None]})
    rows.cast_column("image", datasets.Image()).save_to_disk(tmp_path / "d")
    with pytest.raises(DataError, match="its column image is neither text nor numbers"):
        read(path=str(tmp_path / "d"))


def test_a_data_set_of_the_hub_is_asked_for_by_name_split_and_revision(monkeypatch):
    datasets = pytest.importorskip("datasets", reason="datasets is an optional extra")
    asked = []

    def load(path, **given):
        asked.append((path, given))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert len(read(path="openai/gsm8k", name="main")[0]) == 6
    assert len(read(path="openai/gsm8k@v1", split="test", limit=4)[0]) == 4
    monkeypatch.setattr(sources, "_commit_of", lambda dataset: "c" * 40)
    assert read(path="a/b")[1] == "c" * 40
    names = {"name": None, "split": "train", "revision": None}
    assert asked[0] == ("openai/gsm8k", names | {"name": "main"})
    assert asked[1] == ("openai/gsm8k", names | {"split": "test", "revision": "v1"})


def test_without_a_network_the_error_says_what_to_do(monkeypatch):
    datasets = pytest.importorskip("datasets", reason="datasets is an optional extra")

    def load(*_, **__):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(
        DataError, match=r"openai/gsm8k: there is no such .*HF_HUB_OFFLINE.*no route"
    ):
        read(path="openai/gsm8k")


def test_without_datasets_json_lines_are_read_and_the_extra_is_named(tmp_path, monkeypatch):
    parquet, lines = written(tmp_path, "parquet"), written(tmp_path, "jsonl")
    monkeypatch.setattr(sources, "find_spec", lambda name: None)
    assert len(read(path=str(lines))[0]) == 6
    with pytest.raises(DataError, match=r"pip install 'rl-consistency\[data\]'"):
        read(path=str(parquet))


def test_a_name_is_of_the_hub_only_where_there_is_no_such_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert DataSection(path="openai/gsm8k").path == "openai/gsm8k"
    assert DataSection(path="data/train.jsonl").path == tmp_path / "data/train.jsonl"
    (tmp_path / "openai" / "gsm8k").mkdir(parents=True)
    assert DataSection(path="openai/gsm8k").path == tmp_path / "openai/gsm8k"


PARTS = ((10, 3.0), (40, 1.0))


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_mix_has_its_shares_and_visits_a_source_whole_before_again(shuffle):
    order = DataOrder(50, 10, seed=3, shuffle=shuffle, parts=PARTS)
    drawn = [i for step in range(20) for i in order.batch(step)]
    assert mix_counts(PARTS) == [38, 12]  # 37.5 and 12.5 of an epoch's 50
    assert [sum(i < 10 for i in drawn[e : e + 50]) for e in (0, 50, 100, 150)] == [38] * 4
    small, large = [i for i in drawn if i < 10], [i for i in drawn if i >= 10]
    assert all(Counter(small[n : n + 10]) == Counter(range(10)) for n in range(0, 150, 10))
    assert shuffle or large[:40] == list(range(10, 50))
    assert sorted(large[:40]) == list(range(10, 50)) or shuffle
    again = DataOrder(50, 10, seed=3, shuffle=shuffle, parts=PARTS)
    assert [again.batch(s) for s in (13, 2)] == [order.batch(13), order.batch(2)]
    if shuffle:
        assert DataOrder(50, 10, seed=4, parts=PARTS).batch(0) != order.batch(0)


def test_an_answer_that_is_a_number_has_another_digest_than_its_text(tmp_path):
    found = []
    for answer in (3, 3, "3"):
        path = written(tmp_path, "json", [{"question": "a", "answer": answer}])
        examples = tuple(read(path=str(path))[0])
        found.append(data_digests(PromptSet(examples=examples, prompts=([1],)), {}))
        path.unlink()
    assert found[0] == found[1] != found[2]


def test_sources_without_weights_are_one_file_after_the_other(tiny_run):
    whole = tiny_run.example_file(20)
    lines = whole.read_text().splitlines(keepends=True)
    for name, part in {"a": lines[:12], "b": lines[12:]}.items():
        (tiny_run.directory / f"{name}.jsonl").write_text("".join(part))
    two = [{"path": str(tiny_run.directory / f"{name}.jsonl")} for name in "ab"]
    limits = {"context_length": 64, "vocab_size": 259}
    found = [
        load_prompts(tiny_run.config(**{"data.task": None} | given), byte_tokenizer(), **limits)[0]
        for given in ({"data.path": str(whole)}, {"data.sources": two})
    ]
    assert data_digests(found[0], {}) == data_digests(found[1], {})
    assert found[0].order(4, 0) == found[1].order(4, 0)


@pytest.fixture
def mixed(tiny_run: TinyRun):
    """Changes of the recipe that mix two files."""
    given = [
        {"path": str(tiny_run.example_file(6, "few.jsonl")), "weight": 0.7},
        {"path": str(tiny_run.example_file(20, "many.jsonl")), "weight": 0.3, "limit": 12},
    ]
    return {"data.task": None, "data.sources": given, "training.steps": 2, "training.save_every": 1}


def test_a_mix_is_resumed_exactly_and_a_changed_file_or_weight_is_named(tiny_run, mixed):
    whole, _ = tiny_run(**mixed)
    tiny_run.of_its_own("cut", **mixed | {"training.steps": 1})
    resumed, _ = tiny_run.of_its_own("cut", **mixed, resume=True)
    assert resumed["parameter_digest"] == whole["parameter_digest"]
    one, other = mixed["data.sources"]
    for change in ([{**one, "weight": 0.6}, other], [one, {**other, "limit": 11}], [other, one]):
        with pytest.raises(CheckpointError, match="another fingerprint: training data: "):
            tiny_run(**mixed | {"data.sources": change}, resume=True)


def test_a_source_that_gets_no_draw_of_an_epoch_is_refused(tiny_run, mixed):
    mixed["data.sources"][1]["weight"] = 1e-3
    tiny_run.refused(DataError, "many.jsonl: weight 0.001 gives none of the 18 prompts", **mixed)
