"""vLLM's Model Runner V2 on a CPU: real engine, real workers, Triton kernels interpreted.

`engine.run` starts an engine of one release in a process of its own. docs/testing.md says what this
bed shows and what it can't.
"""
