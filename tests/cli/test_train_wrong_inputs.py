"""Wrong inputs of `regard train`, `generate`, `translate` and `data`: four parts, exit code 2, nothing left behind."""

import shutil

import pytest
import torch

from regard.cli import main
from regard.cli.train import _make_recipe, make_parser
from regard.train import read_run

GOOD = "the quick brown fox jumps over the lazy dog. "
TINY = ["--layers", "1", "--dim", "8", "--heads", "2", "--eval-every", "2"]
GPT = ["train", "gpt", "good.txt", *TINY, "--steps", "4", "--eval-batches", "2", "--sample-tokens", "3"]
GPT += ["--context-length", "16", "--folder", "gpt", "--no-laws"]
TRANSLATE = ["train", "translate", "pairs.tsv", *TINY, "--steps", "2", "--eval-pairs", "2", "--hidden-dim", "8"]
TRANSLATE += ["--vocab-size", "300", "--no-laws", "--folder", "translate"]
FILES = {
    "good.txt": GOOD * 60,
    "empty.txt": "",
    "blank.txt": "\n\n  \n",
    "short.txt": "hello",
    "latin.txt": ("Fünf Äpfel " * 400).encode("latin1"),
    "a.en": "one\ntwo\nthree\n" * 30,
    "a.de": "eins\nzwei\n" * 30,
    "bad.jsonl": '{"text": "a"}\n{oops\n',
    "unlabelled.jsonl": '{"text": "a"}\n',
    "three.tsv": "one\teins\textra\n",
    "single.tsv": "one\teins\n",
    "pairs.tsv": "".join(f"one two {number}\teins zwei {number}\n" for number in range(200)),
    "long.tsv": "".join(f"{'word ' * 90}{number}\t{'wort ' * 90}{number}\n" for number in range(100)),
    "report.pdf": b"%PDF-1.4",
    "broken.toml": "layers = ",
    "vit.json": '{"kind": "vit"}',
    "field.json": '{"kind": "gpt", "layer": 3}',
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with files, a GPT and a translator."""
    place = tmp_path_factory.mktemp("wrong")
    for name, content in FILES.items():
        (place / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert main(GPT) == 0
        assert main(TRANSLATE) == 0
    torch.set_num_threads(threads)
    return place


@pytest.fixture
def here(trained, tmp_path, monkeypatch):
    place = shutil.copytree(trained, tmp_path / "here")
    monkeypatch.chdir(place)
    return place


def files_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


WRONG = [
    ("train gpt missing.txt", "no file 'missing.txt'"),
    ("train gpt empty.txt", "empty.txt is empty"),
    ("train gpt blank.txt", "blank.txt is empty"),
    ("train gpt latin.txt", "byte 1 is 0xfc"),
    ("train gpt short.txt", "too short"),
    ("train gpt good.txt --context-length 9000", "too short"),
    ("train gpt report.pdf", "a file that ends in '.pdf'"),
    ("train gpt bad.jsonl", "Line 2 of bad.jsonl"),
    ("train gpt good.txt --tokenizer sentencepiece", "no tokenizer 'sentencepiece'"),
    ("train gpt good.txt --tokenizer bpe --vocab-size 10", "alone are 258"),
    ("train gpt good.txt --heads 3 --dim 8", "3 heads cannot share 8 channels"),
    ("train vit --heads 3 --dim 8", "3 heads cannot share 8 channels"),
    ("train translate pairs.tsv --heads 3 --dim 8", "3 heads cannot share 8 channels"),
    ("train bert good.txt --tasks mlm --heads 3 --dim 8", "3 heads cannot share 8 channels"),
    ("train gpt good.txt --eval-batches 0", "eval_batches=0"),
    ("train gpt good.txt --sample-tokens -3", "sample_tokens=-3"),
    ("train gpt good.txt --learning-rate fast", "instead  learning_rate=0.001"),
    ("train gpt good.txt --schedule stairs", "instead  schedule='cosine'"),
    ("train gpt good.txt --learning-rate inf", "at least 0 and finite"),
    ("train gpt good.txt --tokenizer bytes --vocab-size 300", "A tokenizer of bytes has no vocab_size"),
    ("train gpt good.txt --context-length 8 --prompt thequick", "prompt of the samples fills the context"),
    ("train gpt good.txt --data empty.txt", "DATA good.txt and --data empty.txt"),
    ("train gpt good.txt --steps 0", "GPTRecipe cannot have steps=0"),
    ("train gpt good.txt --minutes -3", "'-3' is not a positive number of minutes"),
    ("train gpt good.txt --minutes soon", "'soon' is not a positive number of minutes"),
    ("train gpt good.txt --recipe nowhere.json", "no recipe 'nowhere.json'"),
    ("train gpt good.txt --recipe broken.toml", "is not a TOML file"),
    ("train gpt good.txt --recipe vit.json", "regard train vit --recipe"),
    ("train gpt good.txt --recipe field.json", "instead  layers=3"),
    ("train bert good.txt", "needs four documents"),
    ("train bert good.txt --tasks mlm,unknown", "each once"),
    ("train bert good.txt --tasks mlm,entailment", "cannot be made from text alone"),
    (
        "train bert good.txt --tasks mlm --share 0.0001 --batch-size 2 --vocab-size 216",
        "The validation text has no target for mlm",
    ),
    ("train bert good.txt --tasks mlm --vocab-size 60", "would not know 60% of the words"),
    ("train ablation good.txt --seeds 0", "'0' is not a whole number of at least 1"),
    ("train classify unlabelled.jsonl", "it has no 'label'"),
    ("train translate a.en", "the file of its translations"),
    ("train translate a.en a.de", "90 and 60 lines"),
    ("train translate a.en missing.de", "There is no missing.de"),
    ("train translate kjv-luther a.de", "has its own translations"),
    ("train translate three.tsv", "3 columns"),
    ("train translate single.tsv", "1 text\n"),
    ("train translate long.tsv --max-length 20 --vocab-size 300", "all of them longer"),
    ("train translate pairs.tsv --tokens-per-batch 0", "tokens_per_batch=0"),
    ("train spatial imagenet", "the data sets are digits"),
    ("generate nowhere the", "nowhere does not exist"),
    ("generate translate the", "regard translate translate"),
    ("generate gpt the --temperature -1", "0 or more"),
    ("generate gpt the --top-k 0", "top_k=0"),
    ("generate gpt the --top-p 2", "top_p=2.0"),
    ("generate gpt the --max-new-tokens 0", "max_new_tokens=0"),
    ("generate gpt ''", "The prompt has no tokens"),
    ("translate nowhere one", "nowhere does not exist"),
    ("translate gpt one", "regard generate gpt"),
    ("translate translate one --num-beams 0", "num_beams=0"),
    ("translate translate ''", "a SENTENCE without words"),
    ("translate translate one --alignment x.txt", "written as .svg"),
    ("translate translate one --alignment nowhere/x.svg", "there is no folder"),
    ("data nothing", "no data set 'nothing'"),
    ("data --json nowhere/x.json", "there is no folder"),
]


@pytest.mark.parametrize(("words", "told"), WRONG, ids=[words for words, _ in WRONG])
def test_wrong_inputs_are_refused_in_four_parts_and_leave_nothing(words, told, trained, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    before = files_of(trained)
    assert main([word.strip("'") for word in words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("regard: ")  # nothing is announced before the refusal
    assert told in err
    assert "\n  instead  " in err
    assert "  because  " in err or "--minutes" in words or "--seeds" in words  # a usage error is argparse's
    assert files_of(trained) == before
    assert not (trained / "runs").exists()


# Runs that cannot go on


def test_a_run_is_not_resumed_with_another_recipe(here, capsys):
    before = files_of(here)
    assert main([*GPT, "--resume", "--learning-rate", "0.5"]) == 2
    err = capsys.readouterr().err
    assert "asked    learning_rate=0.5\n  found    learning_rate=0.001" in err
    assert files_of(here) == before


@pytest.mark.parametrize("file", ["training.safetensors", "model.safetensors"])
def test_a_corrupted_checkpoint_is_refused_and_removing_it_starts_again(file, here, capsys):
    weights = read_run(here / "gpt").model.state_dict()
    (place,) = (here / "gpt" / "checkpoints").iterdir()
    (place / file).write_bytes((place / file).read_bytes()[:100])
    before = files_of(here)
    assert main([*GPT, "--resume"]) == 2
    err = capsys.readouterr().err
    assert f"{file} cannot be read" in err
    assert f"instead  remove gpt/checkpoints/{place.name} to resume" in err
    assert files_of(here) == before
    shutil.rmtree(place)  # as it says
    assert main([*GPT, "--resume"]) == 0
    again = read_run(here / "gpt").model.state_dict()
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def test_a_corrupted_recipe_is_refused_and_nothing_is_lost(here, capsys):
    (here / "gpt" / "recipe.json").write_text("{oops")
    before = files_of(here)
    assert main([*GPT, "--resume"]) == 2
    err = capsys.readouterr().err
    assert "recipe.json cannot be read" in err
    assert "another folder" in err
    assert files_of(here) == before


def test_a_corrupted_model_is_refused(here, capsys):
    (here / "gpt" / "best" / "model.safetensors").write_bytes(b"junk")
    assert main(["generate", "gpt", "the"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "model.safetensors cannot be read" in err


@pytest.mark.parametrize("size", [500, 4000])
def test_a_full_disk_is_reported_and_the_same_command_goes_on(size, here, capsys):
    resource = pytest.importorskip("resource", reason="this system limits no files")
    weights = read_run(here / "gpt").model.state_dict()
    shutil.rmtree(here / "gpt")
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        assert main(GPT) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))
    err = capsys.readouterr().err
    assert "cannot be saved in gpt" in err
    assert "free some space: the same call resumes" in err
    assert main([*GPT, "--resume"]) == 0
    again = read_run(here / "gpt").model.state_dict()
    assert all(torch.equal(weights[name], again[name]) for name in weights)


# What is no error


def test_parallel_files_are_trained_on(here, capsys):
    for name in ("en", "de"):
        (here / f"b.{name}").write_text("".join(f"{name} {number} {number}\n" for number in range(120)))
    words = [word if word != "pairs.tsv" else "b.en" for word in TRANSLATE[:-1]]
    assert main([*words[:3], "b.de", *words[3:], "parallel"]) == 0
    run = read_run(here / "parallel")
    assert (run.recipe.data, run.recipe.target_data) == ("b.en", "b.de")
    assert run.data.sources[5] == "en 5 5"
    assert run.data.targets[5] == "de 5 5"


def test_a_text_longer_than_the_context_is_generated(here, capsys):
    """The model has 16 tokens of context, and the command's default are 200 new ones."""
    assert main(["generate", "gpt", "the quick", "--seed", "3"]) == 0
    text = capsys.readouterr().out
    assert len(text.rstrip("\n")) >= len("the quick") + 190  # stop tokens there are none
    assert main(["generate", "gpt", "the quick", "--seed", "3"]) == 0
    assert capsys.readouterr().out == text
    prompt = GOOD * 3
    assert main(["generate", "gpt", prompt, "--max-new-tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith(prompt)
    # Within the context it is what the model alone generates.
    run = read_run(here / "gpt")
    tokenizer = run.task.tokenizer
    ids = run.model.generate([tokenizer.encode("the")], max_new_tokens=9, temperature=0.8, seed=4).tokens[0]
    best = main(["generate", "gpt/model", "the", "--seed", "4", "--max-new-tokens", "9"])
    assert best == 0
    assert capsys.readouterr().out == tokenizer.decode([*tokenizer.encode("the"), *ids]) + "\n"


# Values of fields


def test_texts_that_are_numbers_lists_of_one_and_spaces_in_lists_are_understood(here):
    """A prompt of digits is a text, `--dims 12` is a list, and `mlm, sop` are two tasks; a negative seed is one."""
    assert main([*GPT, "--prompt", "5", "--seed", "-1", "--folder", "five"]) == 0
    recipe = read_run("five").recipe
    assert (recipe.prompt, recipe.seed) == ("5", -1)
    one = ["--dims", "6", "--heads", "3", "--depths", "1", "--steps", "1", "--no-laws", "--folder", "one"]
    assert main(["train", "davit", *one]) == 0
    assert read_run("one").recipe.dims == (6,)
    args = make_parser().parse_args(["bert", "--tasks", "mlm, sop", "--option", "views=adjacent"])
    assert _make_recipe(args).tasks == ("mlm", "sop")
    assert _make_recipe(make_parser().parse_args(["spatial", "digits", "--paper"])).data == "digits"
    assert _make_recipe(make_parser().parse_args(["spatial", "--paper"])).data == "cifar10"
