"""The command works wherever its user stands, also in a folder that has a package called like one of ours."""

import os
import subprocess
import sys
import threading
from pathlib import Path


def test_serve_starts_its_replicas_in_a_folder_with_a_cli_of_its_own(smollm2_dir, tmp_path):
    (tmp_path / "cli").mkdir()
    (tmp_path / "cli" / "__init__.py").write_text("raise SystemExit('the wrong cli was imported')\n")
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("turnkeep")), "serve", "--simulate", "--port", "0", "--model", str(smollm2_dir)],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    watchdog = threading.Timer(90, process.kill)
    watchdog.start()
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if " is ready at http" in line:
                break
        assert " is ready at http" in lines[-1], "".join(lines)
        assert "wrong cli" not in "".join(lines)
        process.terminate()
        process.stderr.read()
        assert process.wait() == 0
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        process.stderr.close()
