import gzip
import hashlib
import math

import numpy as np
import pytest
import torch
from torch.func import functional_call, grad, stack_module_state, vmap

from gossamer.errors import InputError
from gossamer.tasks import Batches, Task, TaskConfig, build, multi30k, names

CLASSIFIERS = [
    ("digits", "mlp", 10),
    ("digits", "conv", 10),
    ("shakespeare", "", 10),
    ("multi30k", "", 12),
    ("cifar10", "conv", 10),
    ("cifar10", "resnet18", 10),
]


@pytest.fixture
def make(text_file, sentences, image_file):
    """Build a task by name, with the data it needs."""

    def build_with_data(name, model="", **options):
        paths = {"shakespeare": text_file, "multi30k": sentences, "cifar10": image_file}
        data = str(paths.get(name, ""))
        config = TaskConfig(model=model, data=data, **options)
        return build(name, workers=3, seed=0, config=config)

    return build_with_data


def prepared(task, inputs):
    return task.prepare(inputs) if task.prepare else inputs


@pytest.mark.parametrize("name", names())
def test_every_task_can_be_built(make, name):
    task = make(name)
    assert isinstance(task, Task)
    assert task.name == name
    assert task.defaults["optimizer"] in task.defaults["lr"]
    assert task.defaults["batch"] >= 1
    assert task.labels is None or len(task.labels) == len(task.train[0])


@pytest.mark.parametrize(("name", "model", "classes"), CLASSIFIERS)
def test_the_first_loss_is_near_that_of_guessing(make, name, model, classes):
    task = make(name, model)
    torch.manual_seed(0)
    net = task.model()
    inputs, targets = task.train[0][:16], task.train[1][:16]
    outputs = net(prepared(task, inputs))
    loss = task.loss(outputs, targets)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(classes), abs=0.5)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    assert 0 <= task.correct(outputs, targets).item() <= 1


@pytest.mark.parametrize(("name", "model", "classes"), [*CLASSIFIERS, ("quadratic", "", 0)])
def test_workers_batched_by_vmap_equal_workers_one_by_one(make, name, model, classes):
    task = make(name, model)
    workers, batch = 3, 1 if name == "quadratic" else 2
    torch.manual_seed(0)
    # In double precision: with two samples, batch normalisation makes a deep network very sensitive.
    nets = [task.model().double() for _ in range(workers)]
    x = task.train[0][: workers * batch].unflatten(0, (workers, batch))
    y = task.train[1][: workers * batch].unflatten(0, (workers, batch))
    # Copies: a forward pass of batch normalisation changes its buffers in place.
    parameters, buffers = stack_module_state(nets)
    skeleton = task.model()

    def ready(x):
        x = prepared(task, x)
        if name == "cifar10":
            x = x[..., ::2, ::2]  # a quarter of the work
        return x.double() if x.is_floating_point() else x

    def loss(parameters, buffers, x, y):
        return task.loss(functional_call(skeleton, (parameters, buffers), (ready(x),)), y), buffers

    gradients, buffers = vmap(grad(loss, has_aux=True))(parameters, buffers, x, y)
    for rank, net in enumerate(nets):
        task.loss(net(ready(x[rank])), y[rank]).backward()
        for key, parameter in net.named_parameters():
            torch.testing.assert_close(gradients[key][rank], parameter.grad)
        for key, buffer in net.named_buffers():
            torch.testing.assert_close(buffers[key][rank], buffer)
    assert bool(buffers) == ((name, model) in {("digits", "conv"), ("cifar10", "resnet18")})


def test_plain_training_on_digits_reaches_95_percent(make):
    task = make("digits")
    torch.manual_seed(0)
    net = task.model()
    settings = task.defaults
    optimizer = torch.optim.SGD(net.parameters(), lr=settings["lr"]["sgd"], momentum=settings["momentum"])
    batches = Batches(np.arange(len(task.train[0])), settings["batch"], seed=0, rank=0)
    for step in range(settings["steps"]):
        taken = torch.from_numpy(batches.take(step))
        optimizer.zero_grad()
        task.loss(net(task.train[0][taken]), task.train[1][taken]).backward()
        optimizer.step()
    assert task.correct(net(task.test[0]), task.test[1]).item() >= 0.95


def test_the_digits_split_does_not_depend_on_the_seed():
    first, second = (build("digits", workers=2, seed=seed) for seed in (0, 1))
    assert torch.equal(first.train[0], second.train[0])
    assert len(first.train[0]) == 1437
    assert len(first.test[0]) == 360
    assert np.bincount(first.labels).min() >= 139


def test_the_digits_are_those_of_scikit_learn_to_the_bit():
    task = build("digits", workers=1, seed=0)
    assert task.labels.dtype == np.int64
    digest = hashlib.sha256()
    for tensor in (*task.train, *task.test):
        digest.update(tensor.numpy().tobytes())
    # Of load_digits and train_test_split, as in data/README.md.
    assert digest.hexdigest() == "d5a4412994343a2bc5db6665f0de8de1ddaf028e5bd8cc2f96c52dab18d285d5"


def test_consensus_starts_from_the_workers_own_vectors(make):
    task = make("consensus", dim=7)
    assert not task.gradients
    assert task.model().w.shape == (7,)
    first, second = (task.start(rank, np.random.default_rng(rank)) for rank in (0, 1))
    assert first.shape == (7,)
    assert not np.array_equal(first, second)
    assert task.loss(task.model()(task.train[0]), task.train[1]).item() == 0


def test_quadratic_has_the_minimum_it_promises(make):
    task = make("quadratic", dim=5)
    b = task.train[0]
    assert task.own_data
    assert b.shape == (3, 5)
    net = task.model()
    task.loss(net(b[1:2]), task.train[1][1:2]).backward()
    torch.testing.assert_close(net.w.grad, -b[1])
    with torch.no_grad():
        net.w.copy_(b.mean(0))
    minimum = 0.5 * (b - b.mean(0)).square().sum(1).mean()
    torch.testing.assert_close(task.loss(net(task.test[0]), task.test[1]), minimum)
    assert torch.equal(b, make("quadratic", dim=5).train[0])
    assert not torch.equal(b, build("quadratic", workers=3, seed=1, config=TaskConfig(dim=5)).train[0])


def test_quadratic_noise_is_noise_on_the_gradient(make):
    assert make("quadratic").augment is None
    task = make("quadratic", dim=2000, noise=0.5)
    b = task.train[0][:1]
    noisy = task.augment(b, np.random.default_rng(0))
    assert noisy.dtype == b.dtype
    assert (noisy - b).std().item() == pytest.approx(0.5, rel=0.1)
    assert torch.equal(noisy, task.augment(b, np.random.default_rng(0)))


def test_shakespeare_predicts_the_character_that_follows(make, text_file):
    task = make("shakespeare")
    text = text_file.read_text()
    alphabet = sorted(set(text))
    inputs, targets = task.train
    assert inputs.dtype == torch.uint8
    assert "".join(alphabet[i] for i in inputs[3]) == text[48 : 48 + 64]
    assert "".join(alphabet[i] for i in targets[3]) == text[49 : 49 + 64]
    assert "".join(alphabet[i] for i in task.test[0][0]) == text[2700 : 2700 + 64]
    assert np.array_equal(np.unique(task.labels), np.arange(10))
    assert np.array_equal(task.labels, np.sort(task.labels))
    # Causal: what comes later does not change an earlier prediction.
    net = task.model()
    changed = inputs[:1].long().clone()
    changed[0, 40:] = 0
    torch.testing.assert_close(net(inputs[:1].long())[0, :40], net(changed)[0, :40])


def test_a_text_with_a_large_alphabet_works(tmp_path):
    path = tmp_path / "many.txt"
    path.write_text("".join(chr(0x4E00 + i % 400) for i in range(1000)), encoding="utf-8")
    task = build("shakespeare", workers=1, seed=0, config=TaskConfig(data=str(path)))
    assert task.model()(task.prepare(task.train[0][:1])).shape == (1, 64, 400)


def test_multi30k_counts_the_words_of_the_translation(tmp_path):
    words = {"train.en": "A dog runs.\nA cat", "train.de": "Ein Hund rennt.\nEine Katze"}
    for name, text in words.items():
        (tmp_path / name).write_text(text)
    for language in ("en", "de"):
        (tmp_path / f"val.{language}.gz").write_bytes(gzip.compress(words[f"train.{language}"].encode()))
    task = build("multi30k", workers=1, seed=0, config=TaskConfig(data=str(tmp_path)))
    vocabulary = multi30k.build_vocabulary([["a", "dog", "runs", "."], ["a", "cat"], ["ein", "hund", "rennt", "."]])
    assert (vocabulary["."], vocabulary["a"]) == (4, 5)
    inputs, targets = task.train
    english, german = inputs[0, :4], inputs[0, 5:9]
    assert inputs[0, 4] == multi30k.TRANSLATE
    # It predicts the first German word from the mark, and the end from the last word.
    assert targets[0, :4].tolist() == [multi30k.IGNORED] * 4
    assert targets[0, 4:8].tolist() == german.tolist()
    assert targets[0, 8:].tolist() == [multi30k.END] + [multi30k.IGNORED] * (multi30k.CONTEXT - 9)
    assert english[3] == german[3]
    assert torch.equal(task.test[0], inputs)
    # Only the words that count are in the loss and in the accuracy.
    logits = torch.randn(2, multi30k.CONTEXT, 20, generator=torch.Generator().manual_seed(0))
    counted = targets != multi30k.IGNORED
    expected = torch.nn.functional.cross_entropy(logits[counted], targets[counted].long())
    torch.testing.assert_close(task.loss(logits, targets), expected)
    right = torch.nn.functional.one_hot(targets.clamp(min=0).long(), 20).float()
    assert task.correct(right, targets) == 1
    assert task.correct(-right, targets) == 0


def test_bad_sentence_files_are_refused(tmp_path):
    assert "--data" in refusal("multi30k")
    assert "train.en" in refusal("multi30k", data=str(tmp_path))
    (tmp_path / "train.en").write_text("one\ntwo\n")
    (tmp_path / "train.de").write_text("eins\n")
    assert "2 English and 1 German" in refusal("multi30k", data=str(tmp_path))
    (tmp_path / "train.de.gz").write_bytes(b"not gzip")
    assert "cannot read" in refusal("multi30k", data=str(tmp_path))


def refusal(spec, *, workers=2, seed=0, **options):
    with pytest.raises(InputError) as caught:
        build(spec, workers=workers, seed=seed, config=TaskConfig(**options))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_bad_choices_are_refused(tmp_path):
    assert "Did you mean 'digits'" in refusal("digit")
    assert "mlp" in refusal("digits", model="transformer")
    assert "resnet18" in refusal("cifar10", model="mlp", data="x")
    assert "digits" in refusal("quadratic", model="mlp")
    assert "quadratic" in refusal("digits", noise=0.1)
    assert "consensus, quadratic" in refusal("digits", dim=3)
    assert "shakespeare, multi30k, cifar10" in refusal("digits", data="x")
    assert "--data input.txt" in refusal("shakespeare")
    assert "data_batch_1.bin" in refusal("cifar10")
    assert "workers is 0" in refusal("digits", workers=0)
    assert "seed is -1" in refusal("digits", seed=-1)
    assert "dim is 0" in refusal("quadratic", dim=0)
    assert "--noise is not a number" in refusal("quadratic", noise=math.nan)


def test_bad_texts_are_refused(tmp_path):
    tiny, binary = tmp_path / "tiny.txt", tmp_path / "binary.txt"
    tiny.write_text("to be")
    binary.write_bytes(b"\xff\xfe\x00" * 1000)
    assert "5 characters" in refusal("shakespeare", data=str(tiny))
    assert "UTF-8" in refusal("shakespeare", data=str(binary))
    assert "No such file" in refusal("shakespeare", data=str(tmp_path / "none.txt"))
    assert "directory" in refusal("shakespeare", data=str(tmp_path))


def test_a_task_that_does_not_fit_together_is_refused():
    pair = (torch.zeros(3, 1), torch.zeros(3))
    given = {"name": "mine", "model": torch.nn.Identity, "train": pair, "test": pair, "loss": torch.sub}
    assert Task(**given).defaults == {}
    for wrong, message in (
        ({"train": (torch.zeros(3), torch.zeros(2))}, "3 inputs and 2 targets"),
        ({"test": (torch.zeros(0), torch.zeros(0))}, "at least one"),
        ({"labels": np.zeros(2)}, "2 labels for 3"),
        ({"defaults": {"learning_rate": 1}}, "unknown setting 'learning_rate'"),
    ):
        with pytest.raises(InputError, match=message):
            Task(**given | wrong)
