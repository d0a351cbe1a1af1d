"""Workers on the fake engine, as in the service tests, and runs under load."""

from tests.service.conftest import fake_model, make_worker, producer

__all__ = ("fake_model", "make_worker", "producer")
