"""Optimizers, parameter groups, gradient clipping, loss scaling, and schedules of learning rate and
weight decay."""
