"""A Triton backend `cpu` that compiles nothing.

vLLM turns Triton off on a CPU unless a backend of that name is installed. With TRITON_INTERPRET=1
every kernel runs in Triton's interpreter, which asks no backend for anything.
"""
