"""Output of train.py --dry_run, which describes a run before it trains."""

import types

from helpers import tempered, tiny_run
from parts import dry_run

from jaxrl_llm.sampling import EngineConfig
from jaxrl_llm.trainer import build


def test_every_phase_is_compiled_and_accounted_for(model, capsys):
  config = tiny_run.make_config(model, schedule__window=4)
  config.reward.name = "chain_sum"
  dry_run.dry_run(build.make_run(config))
  said = capsys.readouterr().out
  assert (
    "nothing was trained" in said and "1 cpu (no sharding), each holds" in said
  )
  table = [
    s.strip("| ").split(" | ") for s in said.splitlines() if s[:2] == "| "
  ]
  rows = {name: cells for name, *cells in table[2:]}
  assert set(rows) == {
    *("sampler prefill", "sampler decode", "sampler prefill cut responses"),
    *("score log-probs", "score values", "update policy", "update value"),
  }
  for name, cells in rows.items():
    accounted = not name.startswith("sampler")
    assert len(cells) == 3 + accounted
    assert all(float(cell) >= 0 for cell in cells)


def test_the_sampler_is_lowered_with_the_states_of_its_processors(model):
  run, given = tiny_run.make_run(model, method__use=(tempered.METHOD,)), {}
  engine = types.SimpleNamespace(
    config=EngineConfig(32, 1, 1, stop_tokens=()),
    lower=lambda shapes, **how: given.update(how) or {},
  )
  dry_run.lower_all(run.config, run.learner, engine, run.transfer.shapes)
  assert list(given["processor_states"]) == ["entropy_tau"]
  assert given["prompts"] == 32 // run.config.data.group_size
