"""For all tests, and the processes that they start: CPUs alone, one thread a rank."""

import os


def pytest_configure():
    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", KINETO_LOG_LEVEL="99",
                      TORCH_CPP_LOG_LEVEL="ERROR")
