"""How large a run can be: chips, what programs need of them, how long."""
