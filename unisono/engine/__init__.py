"""The engine: slots, scheduler, runner and the step that ties them. Called by ``entrypoints`` and ``cluster``."""
