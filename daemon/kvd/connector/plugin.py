"""The entry point `vllm.general_plugins`: makes "KvdConnector" a name that vLLM knows.

With it `kv_connector_module_path` is not needed, and MultiConnector can log: it looks its children's classes up by name.
It runs in every process of the engine, before anything else is imported, and must not cost or do more than this.
"""

import logging
import os
from collections.abc import Mapping

logger = logging.getLogger("vllm.kvd")


def register() -> None:
    """Register the connector, once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KvdConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("KvdConnector", "kvd.connector", "KvdConnector")
    warn_of_left_out(os.environ)


def warn_of_left_out(environ: Mapping[str, str]) -> None:
    """VLLM_PLUGINS keeps out what it does not name: say so where the elastic pool was asked for and is not named."""
    allowed = environ.get("VLLM_PLUGINS")
    if environ.get("KVTOOLS_SEGMENT") and allowed is not None and "kvtools" not in allowed.split(","):
        logger.warning("kvd: VLLM_PLUGINS=%s keeps the elastic pool of KVTOOLS_SEGMENT out: add kvtools to it", allowed)
