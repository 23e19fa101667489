"""gRPC surface of vLLM's Rust frontend: schemas, stubs made from them, last released descriptors.

The stubs need the extra ``vllm-ext[grpc]``. ``released.binpb`` is the descriptor set of the last
released wheel; no later schema may break a client of it.
"""
