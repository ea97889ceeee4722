"""As for the tests of the root."""

from tests.conftest import pytest_configure as pytest_configure
