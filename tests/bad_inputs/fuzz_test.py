"""Damaged files are either read or rejected with a one-line error."""

from bad_inputs import mutants


def test_mutants_of_sound_files(tmp_path):
  mutants.write_sound(tmp_path)
  outcomes = mutants.fuzz(tmp_path, 2000)
  assert outcomes.keys() == {target.file for target in mutants.TARGETS}
  for file, counts in outcomes.items():
    assert counts["refused"] > 0.1 * counts.total(), file
