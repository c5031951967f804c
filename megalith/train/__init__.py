"""The training program: rules, build, one step, the loop around it, evaluation."""
