"""The plug into vLLM: a KV connector named KVOffloadConnector.

    vllm serve MODEL --kv-transfer-config \\
        '{"kv_connector":"KVOffloadConnector","kv_role":"kv_both","kv_connector_extra_config":{"host_bytes":"64GiB"}}'

The extra config is kvoffload's Config. vLLM finds the name through the entry point `vllm.general_plugins`; where
plug-ins are switched off, "kv_connector_module_path":"kvoffload.connectors.vllm.connector" does the same.
"""

NAME = "KVOffloadConnector"
MODULE = "kvoffload.connectors.vllm.connector"


def register() -> None:
    """Tell vLLM of the connector. Called in each of its processes, any number of times; imports nothing of kvoffload
    that the engine may not need."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from .compat import is_registered

    if not is_registered(KVConnectorFactory, NAME):
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
