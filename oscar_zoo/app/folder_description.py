"""Everything that is known about the artifact in a folder of the user's own."""

from __future__ import annotations

from oscar_zoo.app.browse import Description, KnownModel
from oscar_zoo.artifact.outcome import Verified, failed_verification
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.lookup import known_entries
from oscar_zoo.registry.targets import PathTarget
from oscar_zoo.registry.verify import check_one, existing_path
from oscar_zoo.serving.memory import estimate_memory


def describe_folder(target: PathTarget, *, gpu_memory: int | None = None) -> Description:
    """What the `oscar.json` of a folder says of the artifact in it, its model, and the scores
    beside it. The files are verified; no hub is asked.
    """
    (entry,), _ = known_entries([target], Sources(offline=True))
    outcome = check_one(existing_path(target.path))
    warnings = () if isinstance(outcome, Verified) else (failed_verification(str(target), outcome),)
    manifests = () if entry.manifest is None else (entry.manifest,)
    return Description(
        name=entry.id.model,
        model=KnownModel.of(None, entry.recipe),
        recipe=entry.recipe,
        manifests=manifests,
        installed=(),
        offered=(),
        unreachable=(),
        warnings=warnings,
        scores={str(entry.id): entry.scores},
        memory=estimate_memory(entry.recipe, manifests, gpu_memory),
        verified=outcome,
    )
