"""Mixtures of experts: who chooses, who answers, and what keeps all busy."""
