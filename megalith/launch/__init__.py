"""Local launcher, worker start and the watchdog that detects hangs."""
