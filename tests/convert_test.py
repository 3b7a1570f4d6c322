"""Tests of scripts/convert.py with training states of torch, TRL and Tunix."""

import fcntl
import functools
import json
import os
import pathlib
import pickle
import re
import shutil
import sys

import convert
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from helpers import programs, tiny_run

from jaxrl_llm import checkpoint, models, workdir
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import optimizer as optimizer_lib
from jaxrl_llm.models.files import hf
from jaxrl_llm.tools import foreign
from jaxrl_llm.trainer import loop

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
dcp = pytest.importorskip("torch.distributed.checkpoint")
state_dict = pytest.importorskip("torch.distributed.checkpoint.state_dict")

_ADAMW = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


def make_run(model, **changes):
  return tiny_run.make_run(model, value__reads_logprobs=False, **changes)


@pytest.fixture(scope="module")
def run(model):
  return make_run(model, run__steps=2)


@pytest.fixture(scope="module")
def trained(run, tmp_path_factory):
  """A run of two steps."""
  folder = tmp_path_factory.mktemp("convert") / "trained"
  loop.train(run, folder)
  return folder


@pytest.fixture(scope="module")
def _begun(run, tmp_path_factory):
  folder = tmp_path_factory.mktemp("convert") / "begun"
  other = tiny_run.with_config(run, run__steps=0, run__seed=1)
  assert loop.train(other, folder) == 0
  assert workdir.steps(folder) == [0]
  return folder


@pytest.fixture
def begun(_begun, tmp_path):
  """A copy of a run that has not trained any step."""
  return pathlib.Path(shutil.copytree(_begun, tmp_path / "begun"))


def items(folder, step, name="policy"):
  """Returns the weights and AdamW state of one model of a run."""
  trees = checkpoint.load_whole(folder / "checkpoints" / str(step))
  adam = trees[f"learner.{name}.optimizer"]["opt_state"][1][0]
  return {"params": trees[f"learner.{name}.trained"], **adam}


refused = functools.partial(programs.refused, convert.main)


def take(begun, folder, *more):
  return convert.main([f"--checkpoint={begun}", f"--take={folder}", *more])


def refused_take(begun, folder):
  return refused(f"--checkpoint={begun}", f"--take={folder}")


def export(run, out, form, *more):
  flags = (f"--checkpoint={run}", f"--out={out}", f"--form={form}")
  return convert.main([*flags, *more])


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
  """The policy of the run in a folder per format; tests must not change it."""
  folder = tmp_path_factory.mktemp("exported")
  for form in foreign.FORMS:
    assert export(trained, folder / form, form) == 0
  return folder


@pytest.fixture
def folders(exported, tmp_path):
  """A copy of them that tests may damage."""
  return pathlib.Path(shutil.copytree(exported, tmp_path / "exported"))


def torch_model(directory):
  """Makes a transformers model and its AdamW as the Trainer does."""
  torch.manual_seed(0)
  config = transformers.AutoConfig.from_pretrained(directory)
  made = transformers.AutoModelForCausalLM.from_config(config)
  params = list(made.parameters())
  groups = [
    {"params": [x for x in params if x.ndim > 1]},
    {"params": [x for x in params if x.ndim < 2], "weight_decay": 0.0},
  ]
  return made, torch.optim.AdamW(groups, **_ADAMW)


def torch_step(made, optimizer, seed=0):
  """Makes one update with random gradients; returns the gradients by name."""
  torch.manual_seed(seed)
  for param in made.parameters():
    param.grad = torch.randn(param.shape)
  optimizer.step()
  return {name: x.grad.numpy() for name, x in made.named_parameters()}


def torch_arrays(made, optimizer):
  """Returns name -> (weight, both moments) of a torch model."""
  return {
    name: (
      param.detach().numpy(),
      optimizer.state[param]["exp_avg"].numpy(),
      optimizer.state[param]["exp_avg_sq"].numpy(),
    )
    for name, param in made.named_parameters()
  }


def assert_is_state(run, step, arrays, count):
  """Compares the policy of a run with arrays of torch, bit for bit."""
  found, config = items(run, step), tiny_run.model_config()
  assert found["count"] == count
  ours = [hf.to_arrays(found[x], config) for x in ("params", "mu", "nu")]
  for name, several in arrays.items():
    for tree, array in zip(ours, several, strict=True):
      np.testing.assert_array_equal(tree[name], array, err_msg=name)


class TestRoundTrip:
  @pytest.mark.parametrize("form", foreign.FORMS)
  def test_the_policy(self, trained, exported, begun, form, capsys):
    place = exported / "tunix/4" if form == "tunix" else exported / form
    assert take(begun, place) == 0
    assert "after 4 updates" in capsys.readouterr().out
    found, wanted = items(begun, 0), items(trained, 2)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    critic = items(begun, 0, "critic")  # It was not changed.
    assert critic["count"] == 0

  @pytest.mark.parametrize("form", ["dcp", "trl"])
  def test_the_critic(self, trained, begun, tmp_path, form):
    out = tmp_path / "out"
    assert export(trained, out, form, "--critic") == 0
    assert take(begun, out, "--critic") == 0
    found, wanted = items(begun, 0, "critic"), items(trained, 2, "critic")
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert wanted["count"] > 0 and np.any(wanted["nu"]["value_head"]["kernel"])

  def test_a_run_trains_on_from_it(self, run, trained, exported, begun):
    assert take(begun, exported / "dcp") == 0
    other = tiny_run.with_config(run, run__steps=1, run__seed=1)
    assert loop.train(other, begun) == 0
    assert items(begun, 1)["count"] == items(trained, 2)["count"] + 2
    rows = tiny_run.comparable(begun)
    assert [row["step"] for row in rows] == [0, 1]


class TestTorch:
  def test_one_more_step_is_ours(self, trained, exported):
    out = exported / "trl"
    made, optimizer = torch_model(out)
    made.load_state_dict(
      transformers.AutoModelForCausalLM.from_pretrained(out).state_dict()
    )
    optimizer.load_state_dict(torch.load(out / "optimizer.pt"))
    for group in optimizer.param_groups:
      group["lr"] = _ADAMW["lr"]
    gradients = torch_step(made, optimizer)

    state, config = items(trained, 2), tiny_run.model_config()
    ours = optimizer_lib.OPTIMIZERS["adamw"](
      _ADAMW["lr"],
      b1=optimizer.param_groups[0]["betas"][0],
      b2=optimizer.param_groups[0]["betas"][1],
      eps=optimizer.param_groups[0]["eps"],
      weight_decay=optimizer.param_groups[0]["weight_decay"],
    )
    adam = optax.ScaleByAdamState(state["count"], state["mu"], state["nu"])
    opt_state = (adam, *ours.init(state["params"])[1:])
    gradients = hf.from_arrays(out, gradients, config)
    updates, opt_state = ours.update(gradients, opt_state, state["params"])
    params = optax.apply_updates(state["params"], updates)
    wanted = [hf.to_arrays(x, config) for x in (params, *opt_state[0][1:])]
    for name, arrays in torch_arrays(made, optimizer).items():
      for found, tree in zip(arrays, wanted, strict=True):
        np.testing.assert_allclose(found, tree[name], rtol=2e-5, atol=2e-8)

  def test_a_torch_program_loads_a_dcp(self, model, trained, exported):
    made, optimizer = torch_model(model)
    weights, state = state_dict.get_state_dict(made, optimizer)
    read = {"model": weights, "optim": state}
    dcp.load(read, checkpoint_id=exported / "dcp")
    state_dict.set_state_dict(
      made, optimizer, model_state_dict=weights, optim_state_dict=state
    )
    count = optimizer.state[made.model.norm.weight]["step"]
    assert_is_state(trained, 2, torch_arrays(made, optimizer), count)

  def test_reads_a_dcp_of_a_torch_program(self, model, begun, tmp_path):
    made, optimizer = torch_model(model)
    for seed in range(3):
      torch_step(made, optimizer, seed)
    weights, state = state_dict.get_state_dict(made, optimizer)
    out = tmp_path / "dcp"
    dcp.save({"model": weights, "optim": state}, checkpoint_id=out)
    assert take(begun, out) == 0
    assert_is_state(begun, 0, torch_arrays(made, optimizer), 3)

  @pytest.mark.parametrize("groups", [1, 2])
  def test_reads_a_checkpoint_of_a_trainer(
    self, model, begun, tmp_path, groups
  ):
    made, optimizer = torch_model(model)
    if groups == 1:
      optimizer = torch.optim.AdamW(made.parameters())
    for seed in range(3):
      torch_step(made, optimizer, seed)
    made.save_pretrained(tmp_path / "trl")
    torch.save(optimizer.state_dict(), tmp_path / "trl" / "optimizer.pt")
    assert take(begun, tmp_path / "trl") == 0
    assert_is_state(begun, 0, torch_arrays(made, optimizer), 3)


# Paths and shapes of Tunix 0.1.7 (Qwen3 of these sizes) in its checkpoints.
_QWEN3 = models.ModelConfig(
  **vars(tiny_run.model_config())
  | {"family": "qwen3", "tie_word_embeddings": False}
)
_MISTRAL = models.ModelConfig(**vars(_QWEN3) | {"family": "mistral"})
_TUNIX = {
  "embedder/input_embedding": (19, 32),
  "final_norm/w": (32,),
  "lm_head/w": (32, 19),
} | {
  f"layers/{i}/{path}": tuple(map(int, shape.split("x")))
  for i in range(2)
  for path, _, shape in (
    row.partition("=")
    for row in """attn/k_norm/w=8 attn/k_proj/w=32x2x8 attn/o_proj/w=4x8x32
attn/q_norm/w=8 attn/q_proj/w=32x4x8 attn/v_proj/w=32x2x8 input_layernorm/w=32
mlp/down_proj/kernel=48x32 mlp/gate_proj/kernel=32x48 mlp/up_proj/kernel=32x48
post_attention_layernorm/w=32""".split()
  )
}


def write_tunix(folder, chain="opt_state/1/0", **changes):
  """Writes random arrays as Tunix does; returns them by item and path."""
  rng = np.random.default_rng(0)
  shapes = {k: x for k, x in (_TUNIX | changes).items() if x is not None}
  draw = lambda start: {
    f"{start}{path}/value": rng.normal(size=shape).astype(np.float32)
    for path, shape in shapes.items()
  }
  params = draw("")
  state = draw(f"{chain}/mu/") | draw(f"{chain}/nu/")
  state[f"{chain}/count/value"] = np.int32(5)
  state["step/value"] = np.uint32(5)
  nest = lambda flat: ocp.tree.from_flat_dict(flat, sep="/")
  for item, flat in (("model_params", params), ("optimizer_state", state)):
    with ocp.PyTreeCheckpointer() as checkpointer:
      checkpointer.save(folder.absolute() / item, nest(flat))
  return params, state


class TestTunix:
  @pytest.mark.parametrize("chain", ["opt_state/1/0", "opt_state/0"])
  def test_reads_its_layout(self, tmp_path, chain):
    params, state = write_tunix(tmp_path / "5", chain)
    found = foreign.read(tmp_path / "5", _QWEN3)
    assert found.step == 5
    for tree, arrays, start in (
      (found.params, params, ""),
      (found.mu, state, f"{chain}/mu/"),
      (found.nu, state, f"{chain}/nu/"),
    ):
      own = lambda path, a=arrays, s=start: a[f"{s}{path}/value"]
      layer = jax.tree.map(lambda x: np.asarray(x[1]), tree["layers"])
      q = own("layers/1/attn/q_proj/w")  # [D, heads, head_dim]
      o = own("layers/1/attn/o_proj/w")  # [heads, head_dim, D]
      ours = layer["attention"]
      for head in range(4):
        columns = slice(8 * head, 8 * head + 8)
        found_q = ours["q"]["kernel"][:, columns]
        np.testing.assert_array_equal(found_q, q[:, head])
        np.testing.assert_array_equal(ours["o"]["kernel"][columns], o[head])
      for ours, name in (
        (layer["mlp"]["down"]["kernel"], "layers/1/mlp/down_proj/kernel"),
        (layer["post_norm"]["scale"], "layers/1/post_attention_layernorm/w"),
        (tree["lm_head"]["kernel"], "lm_head/w"),
        (tree["embed"]["embedding"], "embedder/input_embedding"),
      ):
        np.testing.assert_array_equal(ours, own(name))

  def test_writes_what_it_reads(self, tmp_path):
    params, state = write_tunix(tmp_path / "5")
    found = foreign.read(tmp_path / "5", _QWEN3)
    foreign.write(tmp_path / "out", "tunix", found, _QWEN3)
    load = checkpoint.trees.load_item
    for item, wanted in (("model_params", params), ("optimizer_state", state)):
      tree = load(tmp_path / "out" / "5" / item)
      flat = ocp.tree.to_flat_dict(tree, sep="/")
      schedule = flat.pop("opt_state/1/2/count/value", None)
      assert (schedule is None) == (item == "model_params")
      assert flat.keys() == wanted.keys()
      for key, array in wanted.items():
        np.testing.assert_array_equal(flat[key], array, err_msg=key)
        assert flat[key].dtype == array.dtype

  def test_another_model_is_refused(self, tmp_path):
    q, up = "layers/0/attn/q_proj/w", "layers/1/mlp/up_proj/kernel"
    for number, (changes, said) in enumerate(
      (
        ({q: (32, 8, 4)}, "q_proj.w has (32, 8, 4), not (32, 4, 8)"),
        ({up: None}, "up_proj.kernel has (0,), not (32, 48)"),
        ({f"{q}_lora_a": (32, 2)}, "w_lora_a' is unexpected"),
      )
    ):
      write_tunix(tmp_path / str(number), **changes)
      with pytest.raises(InputError, match=re.escape(said)):
        foreign.read(tmp_path / str(number), _QWEN3)

  def test_other_folders_families_and_critics_are_refused(self, tmp_path):
    write_tunix(tmp_path / "5")
    families = "Tunix has policies of Llama and Qwen"
    for folder, config, outputs, said in (
      (tmp_path, _QWEN3, None, "for tunix, the folder of a step"),
      (tmp_path / "5", _QWEN3, 1, families),
      (tmp_path / "5", _MISTRAL, None, families),
    ):
      with pytest.raises(InputError, match=said):
        foreign.read(folder, config, outputs)


class _Evil:
  """Its pickle executes a command when it is read."""

  def __init__(self, canary):
    self.canary = canary

  def __reduce__(self):
    return os.system, (f"touch {self.canary}",)


class TestNothingIsExecuted:
  def test_a_file_of_torch_or_its_metadata(self, folders, begun):
    canary, file = folders / "canary", folders / "dcp" / ".metadata"
    shutil.copy(file, folders / "whole")
    metadata = pickle.loads(file.read_bytes())
    metadata.planner_data = _Evil(canary)
    file.write_bytes(pickle.dumps(metadata))
    line = refused_take(begun, file.parent)
    assert "names posix.system: do not trust it" in line
    for name in ("trl/optimizer.pt", "dcp/__0_0.distcp"):
      torch.save({"state": _Evil(canary)}, folders / name)
      if name[:3] == "dcp":
        shutil.copy(folders / "whole", file)
      line = refused_take(begun, (folders / name).parent)
      assert "cannot be read as a training state" in line
    assert not canary.exists()

  def test_functions_of_torch_in_metadata_are_not_called(
    self, folders, begun, monkeypatch
  ):
    called = []
    monkeypatch.setattr(torch, "tripwire", called.append, raising=False)
    file = folders / "dcp" / ".metadata"
    # GLOBAL, BININT1, TUPLE1, REDUCE and POP, before the old pickle.
    call = b"ctorch\ntripwire\nK\x01\x85R0"
    file.write_bytes(call + file.read_bytes())
    pickle.loads(file.read_bytes())
    assert called == [1]  # Only by this plain reader.
    assert take(begun, file.parent) == 0
    assert called == [1]

  def test_pickles_in_a_dcp_are_not_read(self, model, begun, tmp_path):
    """Torch would execute a pickle in place of an optimizer's number."""
    canary, out = tmp_path / "canary", tmp_path / "dcp"
    made, optimizer = torch_model(model)
    torch_step(made, optimizer)
    weights, state = state_dict.get_state_dict(made, optimizer)
    state["param_groups"][0]["note"] = _Evil(canary)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=out)
    canary.unlink(missing_ok=True)
    assert take(begun, out) == 0
    assert not canary.exists()


class TestRefusals:
  def test_runs_that_cannot_take_it(self, model, trained, exported, begun):
    line = refused_take(trained, exported / "dcp")
    assert "has steps; create a run with --config.run" in line
    with (begun / "lock").open("a") as lock:
      fcntl.flock(lock, fcntl.LOCK_EX)
      assert "is being trained" in refused_take(begun, exported / "dcp")
    assert items(begun, 0)["count"] == 0
    run = make_run(model, run__steps=0, method__use=("ppo_ewma",))
    loop.train(run, begun.parent / "ewma")
    line = refused_take(begun.parent / "ewma", exported / "dcp")
    assert "has learner.ema, which depends on the policy" in line

  def test_missing_torch(self, exported, begun, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    for flags in (
      (f"--checkpoint={begun}", f"--take={exported / 'dcp'}"),
      (f"--checkpoint={begun}", f"--out={tmp_path / 'x'}", "--form=dcp"),
    ):
      line = refused(*flags)
      assert "torch" in line and "pip install -e '.[parity]'" in line

  def test_other_states(self, folders, begun):
    file = folders / "trl/optimizer.pt"
    whole = file.read_bytes()
    for damage, said in (
      (lambda x: x.pop("exp_avg_sq"), "trl/exp_avg_sq: tensor"),
      (lambda x: x.update(a=x.pop("exp_avg")), ".a' is unexpected"),
      (lambda x: x.update(b=x["exp_avg"]), ".b' is unexpected"),
      (lambda x: x["step"].add_(1), "several update counts, [4, 5]"),
      (lambda x: x["exp_avg"].fill_(torch.nan), "are not finite"),
      (lambda x: x.update(exp_avg=torch.zeros(3)), "has shape [3]"),
    ):
      file.write_bytes(whole)
      saved = torch.load(file)
      damage(saved["state"][1])
      torch.save(saved, file)
      assert said in refused_take(begun, file.parent)
    assert items(begun, 0)["count"] == 0

  def test_another_model(self, folders, begun):
    out = folders / "trl"
    text = (out / "config.json").read_text()
    (out / "config.json").write_text(text.replace("10000.0", "20000.0"))
    line = refused_take(begun, out)
    assert "its model has another configuration" in line
    (out / "optimizer.pt").unlink()
    (out / "config.json").write_text(text)
    assert "has no optimizer.pt; weights alone" in refused_take(begun, out)

  def test_a_directory_with_files(self, trained, tmp_path):
    (tmp_path / "note").touch()
    flags = f"--checkpoint={trained}", f"--out={tmp_path}", "--form=dcp"
    assert "has files; choose another directory" in refused(*flags)

  @pytest.mark.parametrize(
    ("key", "value"),
    [("model.lora_rank", 2), ("optimizer.policy.name", "adafactor")],
  )
  def test_a_run_of_adapters_or_of_another_optimizer(
    self, begun, tmp_path, key, value
  ):
    config, out = workdir.read_config(begun), tmp_path / "x"
    config.update_from_flattened_dict({key: value})
    (begun / "config.json").write_text(json.dumps(config.to_dict()))
    for form in ("dcp", "trl"):
      flags = f"--checkpoint={begun}", f"--out={out}", f"--form={form}"
      line = refused(*flags)
      assert "does not train all parameters of the policy with AdamW" in line
    assert not out.exists()
