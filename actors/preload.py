"""Imports what an engine's process needs, once, in the server that forks it. `prefork` imports this module by name."""

import gc

import setproctitle

from actors.uncompiled import uncompiled
from volley.imports import without
from volley.processes import die_with_parent

die_with_parent()
with uncompiled(), without("ray"):  # it keeps what it reads from the environment as it is imported
    import transformers.models.auto.modeling_auto  # noqa: F401
    import vllm.model_executor.layers.quantization.online.base
    import vllm.model_executor.model_loader.default_loader
    import vllm.model_executor.models.registry
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.platforms import current_platform

    # vLLM replaces kernels that need Triton. It looks for them in every module: a third of a second in each engine.
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda _: None)

setproctitle.setthreadtitle("volley::prefork")  # a whole title could not be replaced in forked processes
gc.collect()
gc.freeze()  # objects that are never collected are never written to, so their memory stays shared with the server
