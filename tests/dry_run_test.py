"""What train.py --dry_run says of a run before it trains."""

from helpers import tiny_run
from parts import dry_run

from jaxrl_llm.train import build


def test_every_phase_is_compiled_and_accounted_for(tmp_path, capsys):
  model = tiny_run.write_model(tmp_path / "tiny")
  config = tiny_run.make_config(model, schedule__window=4)
  config.reward.name = "chain_sum"
  dry_run.dry_run(build.make_run(config))
  said = capsys.readouterr().out
  assert "nothing was trained" in said and "devices 0; each holds" in said
  table = said[said.index("phase   ") :].splitlines()[1:-1]
  rows = {row[:31].strip(): row[31:].split() for row in table}
  assert set(rows) == {
    *("sampler prefill", "sampler decode", "sampler prefill cut responses"),
    *("score log-probs", "score values", "update policy", "update value"),
  }
  for name, cells in rows.items():
    accounted = not name.startswith("sampler")
    assert len(cells) == 3 + accounted
    assert all(float(cell) >= 0 for cell in cells)
