"""All that the agent writes on its own Node object: capacity, taint, conditions, labels, inventory."""
