"""The entry point `vllm.general_plugins`: makes "KvdConnector" a name that vLLM knows.

With it `kv_connector_module_path` is not needed, and MultiConnector can log: it looks its children's classes up by name.
It runs in every process of the engine, before anything else is imported, and must not cost or do more than this.
"""


def register() -> None:
    """Register the connector, once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KvdConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("KvdConnector", "kvd.connector", "KvdConnector")
