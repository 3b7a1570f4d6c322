"""The type of the settings of a run.

At runtime they are an `ml_collections.ConfigDict` with these attributes, made
by `config.default_config`; the classes of the groups have names and types of
the settings for readers, editors and type checkers.
"""

from jaxrl_llm.config import keys, training_keys, zoo


class Settings:
  """The settings of a run."""

  model: keys.Model
  value: keys.Value
  data: keys.Data
  reward: keys.Reward
  environment: keys.Environment
  mesh: keys.Mesh
  sampler: keys.Sampler
  schedule: keys.Schedule
  estimator: training_keys.Estimator
  loss: training_keys.Loss
  off_policy: training_keys.OffPolicy
  optimizer: training_keys.Optimizers
  method: zoo.Method
  eval: training_keys.Eval
  checkpoint: training_keys.Checkpoint
  run: training_keys.Run
