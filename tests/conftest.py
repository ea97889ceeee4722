"""tests/plugin.py runs tests on ranks."""

pytest_plugins = ["tests.plugin"]
