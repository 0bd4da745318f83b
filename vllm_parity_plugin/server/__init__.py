"""The plugin's HTTP face under ``/v1/parity``."""
