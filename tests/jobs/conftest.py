"""Fixtures of the job tests."""

from tests.support.batch_jobs import batch_fixture as batch_fixture
from tests.support.batch_jobs import seen as seen
from tests.support.fake_llm import make_llm_fixture as make_llm_fixture
