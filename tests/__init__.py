# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors

import os

# pytest-xdist runs a process a core: none of them needs Inductor's own pool of processes as well
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
