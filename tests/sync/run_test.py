"""Corrupted weight transfers are detected within a step of a real run."""

import dataclasses

import pytest
from helpers import tiny_mesh_run, tiny_run
from helpers.tiny_mesh_run import Spy, recorded
from helpers.tiny_run import with_config
from helpers.tiny_tppo import newest

from jaxrl_llm import sync
from jaxrl_llm.trainer import loop

WRONG = 2  # The version whose transfer goes wrong.


@pytest.fixture(scope="module")
def run(model):
  """A run whose sampler has a separate mesh."""
  return tiny_mesh_run.run_maker(model)("apart")


def _skipped(transfer, run, params, version, old):
  return old


def _stale(transfer, run, params, version, old):
  """One leaf does not arrive."""
  new = transfer.send(params, version)
  final_norm = old.params["final_norm"]
  return dataclasses.replace(
    new, params=new.params | {"final_norm": final_norm}
  )


def mutated(run, mutation):
  """Returns the run with another transfer after step WRONG."""

  def send(params, version, replaces=None):
    if version == WRONG:
      return mutation(run.transfer, run, params, version, replaces)
    return run.transfer.send(params, version, replaces)

  transfer = Spy(run.transfer, send=send)
  return dataclasses.replace(run, transfer=transfer)


class TestMutations:
  """The transfer after step 2 is corrupted; step 3 must not be sampled."""

  def test_a_stale_leaf_is_found_within_a_step(self, run, tmp_path):
    run = with_config(run, eval__every=4, sampler__parity_check_every=1)
    message = r"^final_norm/scale \(1 of .* leaves\) .* at version 2"
    with (
      recorded(run) as rollouts,
      pytest.raises(sync.SyncError, match=message) as error,
    ):
      loop.train(mutated(run, _stale), tmp_path)
    assert "\n" not in str(error.value)
    rows = tiny_run.comparable(tmp_path)
    assert [row["step"] for row in rows] == [0, 1]
    assert len(rollouts) == 1 + WRONG  # An evaluation and two steps.

  @pytest.mark.parametrize("every", [2, 4])
  def test_versions_are_compared_in_every_step(self, run, tmp_path, every):
    # WRONG is followed by an evaluation, or by a step.
    run = mutated(with_config(run, eval__every=every), _skipped)
    said = "holds version 1, .* version 2"
    with recorded(run) as rollouts, pytest.raises(sync.SyncError, match=said):
      loop.train(run, tmp_path)
    assert len(rollouts) == 1 + WRONG

  @pytest.mark.slow
  def test_the_next_start_sends_anew(self, run, tmp_path):
    broken = tmp_path / "broken"
    run = with_config(run, sampler__parity_check_every=WRONG)
    with pytest.raises(sync.SyncError):
      loop.train(mutated(run, _stale), broken)
    loop.train(run, broken)
    loop.train(run, tmp_path / "whole")
    assert tiny_run.comparable(broken) == tiny_run.comparable(
      tmp_path / "whole"
    )


def checked(run, refuse=None):
  """Returns the run, and versions whose parity it checks; one may fail."""
  versions = []

  def check(params, weights):
    versions.append(weights.version)
    error = run.parity_check(params, weights)
    if weights.version == refuse:
      raise sync.SyncError("refused")
    return error

  return dataclasses.replace(run, parity_check=check), versions


def counted(run):
  """Returns the run, and a list that grows with every checksum comparison."""
  calls = []

  def checksums(params):
    calls.append(run.transfer.checksums(params))
    return calls[-1]

  transfer = Spy(run.transfer, checksums=checksums)
  return dataclasses.replace(run, transfer=transfer), calls


class TestChecks:
  """Checksums and log-probs are compared at every start and when due."""

  @pytest.mark.parametrize(("every", "due"), [(0, []), (2, [0, 2]), (9, [0])])
  def test_pass_and_are_logged(self, run, tmp_path, every, due):
    run, sums = counted(run)
    run = with_config(run, sampler__parity_check_every=every)
    run, versions = checked(run)
    loop.train(with_config(run, run__steps=2), tmp_path)
    # The first checksums are compared even if the checks are off.
    assert versions == due and len(sums) == max(1, len(due))
    errors = {
      row["step"]: row["sampler_trainer/parity_error"]
      for row in tiny_run.comparable(tmp_path)
      if "sampler_trainer/parity_error" in row
    }
    assert list(errors) == due
    assert all(0 <= error <= 1e-6 for error in errors.values())
    loop.train(with_config(run, run__steps=3), tmp_path)
    assert versions == [*due, *([2] if every else [])]
    assert len(sums) == max(1, len(due)) + 1
    assert newest(run, tmp_path)[1].version == 3

  @pytest.mark.parametrize("version", [0, WRONG])
  def test_a_refusal_stops_the_run(self, run, tmp_path, version):
    run, _ = checked(
      with_config(run, sampler__parity_check_every=WRONG), version
    )
    refused = pytest.raises(sync.SyncError, match="refused")
    with recorded(run) as rollouts, refused:
      loop.train(run, tmp_path)
    # Before the next sample; at the start, even before the evaluation.
    assert len(rollouts) == (1 + version if version else 0)
    assert len(tiny_run.comparable(tmp_path)) == version
