"""Methods beyond PPO, GRPO, DAPO, VC-PPO, VAPO and T-PPO, one file each.

A file has a function of its name, (algorithm, settings, *, its own settings) ->
algorithm, that `method.use` names. It is imported when a config uses it, so
that an unused method costs nothing, and nothing outside this folder names one.
"""
