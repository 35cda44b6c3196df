# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Metadata is in setup.cfg; here what the address of the repository says, where a build knows it
(GitHub's own variables, in .github/workflows/release.yml): the URLs beside a package on an index,
and where its README's relative links and pictures lead."""

import os
import re
from pathlib import Path

from setuptools import setup

readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
urls = {}
if name := os.environ.get("GITHUB_REPOSITORY"):
    address = f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{name}"
    urls = {
        "Source": address,
        "Documentation": f"{address}/tree/main/docs",
        "Changelog": f"{address}/blob/main/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }
    revision = os.environ.get("GITHUB_REF_NAME", "main")
    readme = re.sub(r"(!\[[^\]]*\]\()(?!\w+:)", rf"\1{address}/raw/{revision}/", readme)
    readme = re.sub(r"\]\((?!\w+:|#)", f"]({address}/blob/{revision}/", readme)

setup(long_description=readme, long_description_content_type="text/markdown", project_urls=urls)
