"""What the chart refuses before anything is created, and what it says then."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.chart import Refused, rendered, rendered_text, requires_helm

pytestmark = requires_helm

Values = dict[str, Any]


@pytest.mark.parametrize(
    "values, said",
    [
        ({"routr": {}}, "additional properties 'routr' not allowed"),
        ({"settings": {"decode": {"num_slot": 1}}}, "'num_slot' not allowed"),
        ({"settings": {"decode": {"num_slots": "many"}}}, "/settings/decode/num_slots"),
        ({"settings": {"engine": {"device": "cuda"}}}, "'device' not allowed"),
        ({"settings": {"router": {"port": 1}}}, "'port' not allowed"),
        ({"monitoring": {"prometheusRule": {"thresholds": {"first_token": 1}}}}, "'first_token'"),
        ({"router": {"image": {"tag": "latest"}}}, "/router/image/tag"),
    ],
)
def test_helm_says_where_a_value_is_misspelt(values: Values, said: str) -> None:
    with pytest.raises(Refused) as refused:
        rendered(values=values)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "values, said",
    [
        ({"rdma": {"enabled": True}}, "rdma.enabled needs rdma.resourceName"),
        (
            {"decode": {"accelerator": {"type": "nvidia", "count": 8}, "mesh": {"dp": 4, "tp": 4}}},
            "has 16 ranks, one for each device, but there are 8",
        ),
        (
            {"prefill": {"mesh": {"dp": 3}, "multinode": {"size": 2}}},
            "do not divide by multinode.size 2",
        ),
        ({"decode": {"mesh": {"dp": 4, "ep": 2}}}, "so give 4 or 1"),
        ({"decode": {"accelerator": {"count": 1}}}, "type cpu has no resource to count"),
        (
            {"decode": {"terminationGracePeriodSeconds": 60}},
            "decode.terminationGracePeriodSeconds is 60, but 135 are needed",
        ),
        ({"model": {"name": "big"}}, "the images carry dspark-tiny only"),
        ({"model": {"name": "m", "source": "pvc"}}, "needs model.pvc.claimName"),
        ({"model": {"name": "m", "source": "hostPath"}}, "needs model.hostPath.path"),
        ({"model": {"name": "m", "source": "image"}}, "needs model.image.reference"),
        ({"model": {"name": "m", "source": "huggingFace"}}, "needs model.huggingFace.repo"),
        (
            {
                "model": {
                    "name": "m",
                    "source": "huggingFace",
                    "huggingFace": {"repo": "o/m", "cache": {"claimName": "c", "hostPath": "/c"}},
                }
            },
            "give one of them",
        ),
        ({"decode": {"autoscaling": {"enabled": True}}}, "needs keda.prometheusAddress"),
        (
            {"router": {"autoscaling": {"enabled": True, "minReplicas": 9}}},
            "minReplicas is 9 and maxReplicas 8",
        ),
        (
            {
                "router": {
                    "autoscaling": {"enabled": True},
                    "resources": {"requests": {"cpu": None}},
                }
            },
            "needs router.resources.requests.cpu",
        ),
        ({"router": {"adminPort": 50051}}, "router.adminPort and router.port are both 50051"),
        (
            {"prefill": {"hostNetwork": True}, "decode": {"hostNetwork": True, "adminPort": 9091}},
            "prefill.adminPort and decode.adminPort are both 9091",
        ),
    ],
)
def test_what_contradicts_itself_is_refused_with_a_way_out(values: Values, said: str) -> None:
    with pytest.raises(Refused) as refused:
        rendered(values=values)
    assert said in str(refused.value)


def test_image_volumes_are_refused_where_kubernetes_has_none() -> None:
    with pytest.raises(Refused, match=r"needs Kubernetes 1\.33 or newer, this is v1\.29\.0"):
        rendered_text("multinode-lws", version="1.29.0")
