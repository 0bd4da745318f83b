"""vllm-parity, the part that runs inside vLLM's processes.

vLLM calls :func:`register` through the ``vllm.general_plugins`` entry point in every process it
starts. Everything else in this package is imported on demand, so that a trainer can use the
vLLM-free modules (``wire``, ``settings``, ``mismatch``) without loading vLLM.
"""

__version__ = "0.1.0"


def register() -> None:
    """Install the parity rules in this vLLM process (idempotent; touches no device).

    Raises:
        ParityError: the installed vLLM cannot be protected. vLLM swallows errors raised while a
            plugin is *imported*, but not those raised by this function, so the server stops.
    """
    from vllm_parity_plugin.install import install

    install()
