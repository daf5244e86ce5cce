"""Hold `nox -s release` to what it must refuse."""

import zipfile
from pathlib import Path

from check_release import unreleased, wrong_wheel


def test_a_changelog_without_a_date_or_of_another_version_is_refused() -> None:
    assert unreleased("kpt-moe", "0.2.0", "# Changes\n\n## 0.2.0 (2026-11-30)\n\n## 0.1.0 (2026-11-01)\n") == []
    assert "by the date" in unreleased("kpt-moe", "0.2.0", "## 0.2.0 (unreleased)\n")[0]
    assert "begins with 0.1.0" in unreleased("kpt-moe", "0.2.0", "## 0.1.0 (2026-11-01)\n")[0]


def test_a_wheel_with_tests_and_of_another_version_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "kpt_moe-0.2.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("kpt_moe/py.typed", "")
        archive.writestr("kpt_moe-0.2.0.dist-info/METADATA", "Name: kpt-moe\nVersion: 0.1.0\n\nWhat it is.\n")
        archive.writestr("kpt_moe-0.2.0.dist-info/licenses/LICENSE", "")
        archive.writestr("tests/test_moe.py", "")
    faults = " ".join(wrong_wheel(wheel, "kpt-moe", "0.2.0"))
    assert "tests/test_moe.py has no place in a wheel" in faults
    assert "its metadata is of kpt-moe 0.1.0; expected kpt-moe 0.2.0" in faults
