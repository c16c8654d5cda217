"""Labels by which SELinux lets every pod use what the agent shows them."""

import os
from pathlib import Path

ATTRIBUTE = "security.selinux"
# The type of what pods write to, and no category, so that those of every pod may: container-selinux's policy.
POD_LABEL = b"system_u:object_r:container_file_t:s0\0"


def obstacle(folder: Path) -> str | None:
    """Why files of a folder could not be labelled for pods; None: nothing is seen. Blocks; leaves nothing."""
    try:
        os.getxattr(folder, ATTRIBUTE)
        descriptor = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError:
        return None  # no SELinux, or a file system without such files
    try:
        os.setxattr(descriptor, ATTRIBUTE, POD_LABEL)
    except OSError as error:
        return (
            f"SELinux would keep pods from files below {folder}: they cannot be labelled ({error.strerror}); "
            "let the agent relabel them, as spc_t in a privileged container does, or mount the folder from a "
            "file system with labels"
        )
    finally:
        os.close(descriptor)
    return None


def label_for_pods(root: Path, *files: Path) -> str | None:
    """Label `files` so that SELinux lets pods have them; the obstacle in words, or None. Blocks.

    `root` shows whether this kernel has SELinux at all.
    """
    try:
        os.getxattr(root, ATTRIBUTE)
    except OSError:
        return None
    for file in files:
        try:
            os.setxattr(file, ATTRIBUTE, POD_LABEL)
        except OSError as error:
            return f"{file} cannot be labelled for pods: {error.strerror}"
    return None
