"""What an engine's process needs, imported once before it is forked. Imported by name, see ``prefork``."""

import gc

import ray  # noqa: F401 - a forked child of a Ray worker imports the worker's main module
import setproctitle
import transformers.models.auto.modeling_auto  # noqa: F401
import vllm.model_executor.model_loader.default_loader
import vllm.model_executor.models.registry
import vllm.v1.engine.core
import vllm.v1.worker.cpu_worker  # noqa: F401

from actors.lifeline import die_with_parent

die_with_parent()
setproctitle.setproctitle("volley::prefork")  # the first call must come before any change of the environment
gc.collect()
gc.freeze()  # what is never collected is never written to, and stays shared with the server
