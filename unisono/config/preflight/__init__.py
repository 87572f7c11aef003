"""Checks of a checkpoint and of flags without torch or transformers, so that a refusal takes a second.

The command line and ``LLM`` call :func:`unisono.config.preflight.model.check_model` before anything slow is imported.
The loader calls the same functions, so that there is one table of supported models.
"""
