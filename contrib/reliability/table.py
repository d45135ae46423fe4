"""Every experiment of `make reliability`, one row each, in the order of the page.

To add one, write a function that takes a `Scale` and returns a `Found`, and add its row. A sample
of it runs in `make test`, so that takes a few seconds at most; `instead` names other tests where
none does.
"""

from __future__ import annotations

import attack_experiments
import crowd_experiments
import disk_experiments
import disk_faults
import download_experiments
import full_disk
import fuzz_coverage
import fuzz_experiments
import load_experiments
import lying_hub_experiments
import mathematics_experiments
import race_experiments
import reading_experiments
import request_experiments
import same_bytes_experiments
import secret_experiments
import serving_experiments
import tiny_artifacts
from experiment import Experiment

EXPERIMENTS = (
    Experiment(
        "S1",
        "runs-nothing",
        "Verifying a file imports, opens, starts and connects nothing, and needs no torch.",
        reading_experiments.runs_nothing,
    ),
    Experiment(
        "S2",
        "bad-files",
        "Every bad file is refused with its own code, quickly and with little memory.",
        reading_experiments.by_its_code,
    ),
    Experiment(
        "S3",
        "fuzz",
        "No file crashes or hangs the reader or exhausts memory.",
        fuzz_experiments.never_harmful,
    ),
    Experiment(
        "S3",
        "guided-fuzz",
        "No file crashes or hangs the reader, also where coverage leads from file to file.",
        fuzz_coverage.guided,
        fuzz_coverage.lacking,
        instead="tests/reliability/test_short.py",
    ),
    Experiment(
        "S4",
        "same-as-torch",
        "What is accepted is what torch.load reads, bit for bit.",
        fuzz_experiments.as_torch_reads,
        fuzz_experiments.lacking_torch,
    ),
    Experiment(
        "S5",
        "published-files",
        "Files that were published elsewhere pass, with the digests that were seen.",
        reading_experiments.published_files,
        tiny_artifacts.absent,
    ),
    Experiment(
        "S6",
        "damaged-downloads",
        "Every damaged delivery is refused, and nothing in the store is touched.",
        download_experiments.damaged,
    ),
    Experiment(
        "S7",
        "kill",
        "After a kill at any moment every version is absent or whole, and the same command run"
        " again repairs the rest.",
        disk_experiments.killed_anywhere,
        disk_faults.lacking,
        instead="tests/registry/test_store.py",
    ),
    Experiment(
        "S8",
        "disk-errors",
        "Errors of the disk end a command with an exit code and one line, and nothing is lost.",
        disk_experiments.failing_disk,
        disk_faults.lacking,
    ),
    Experiment(
        "S8",
        "full-disk",
        "A disk that fills up ends a command with an exit code and one line, and nothing is lost.",
        full_disk.filled,
        full_disk.lacking,
        instead="tests/registry/test_store.py",
    ),
    Experiment(
        "S9",
        "crowd",
        "Processes that share a store do not disturb each other, and fetch each file once.",
        crowd_experiments.crowded,
    ),
    Experiment(
        "S10",
        "publishers",
        "No publisher replaces, mixes or loses what another one publishes at the same moment.",
        race_experiments.publishers,
    ),
    Experiment(
        "S11",
        "lying-hubs",
        "What a hub offers in place of what was published is refused.",
        lying_hub_experiments.lies,
    ),
    Experiment(
        "S12",
        "secrets",
        "A token goes to its hub and nowhere else; a key is in no text, file or argument.",
        secret_experiments.stay_secret,
    ),
    Experiment(
        "S13",
        "swaps",
        "What was verified is what is served, whoever writes to the files meanwhile.",
        serving_experiments.verified_is_served,
    ),
    Experiment(
        "S14",
        "closed",
        "No argument of `serve` opens the server or gives SGLang a flag that nobody meant.",
        serving_experiments.closed_by_default,
        serving_experiments.lacking_sglang,
    ),
    Experiment(
        "S15",
        "mistakes",
        "A rotation that is wrong does not match its statistics, and a right one does.",
        mathematics_experiments.mistakes_found,
    ),
    Experiment(
        "S16",
        "requests",
        "No request ends a server, or changes what others are answered.",
        request_experiments.end_no_server,
        request_experiments.lacking_sglang,
    ),
    Experiment(
        "S16",
        "load",
        "A server holds under load, and leaves nothing behind when a process of it is killed.",
        load_experiments.held_under_load,
        load_experiments.lacking_sglang,
        instead="tests/cli/test_bench.py",
    ),
    Experiment(
        "S16",
        "attack",
        "No client occupies a server: the others get their answers, and in time.",
        attack_experiments.occupied_by_nobody,
        load_experiments.lacking_sglang,
        instead="tests/engines/sglang/test_http.py",
    ),
    Experiment(
        "S17",
        "same-bytes",
        "The same input gives the same bytes.",
        same_bytes_experiments.reproducible,
    ),
)
