"""Kubernetes objects as they stand in files: lists, several documents, the output of kubectl, notes."""

from __future__ import annotations

import json

import yaml

from tests.declaration.manifests import endpoint_slice, notes, service
from tests.lab.inside import declare
from vipd.model.service import Backend, Origin, Protocol, Service, ServicePort

TCP, UDP = Protocol.TCP, Protocol.UDP


def test_documents_of_both_languages_in_any_order() -> None:
    native = "apiVersion: vipd/v1\nservices: [{name: a, address: 10.96.0.1, ports: 53}]\n"
    text = "---\n".join(
        yaml.safe_dump(document) if isinstance(document, dict) else document
        for document in (endpoint_slice("10.244.0.1"), native, service(), native.replace("a,", "b,"))
    )
    declaration = declare(text, "x.yaml")
    (problem,) = declaration.problems
    assert problem.what == "b: 10.96.0.1:53/tcp already belongs to a at x.yaml:15"
    assert [found.name for found in declaration.services] == ["a", "default/web", "b"]
    assert declaration.services[1].backends == (Backend("10.244.0.1"),)
    assert declaration.services[1].origin == Origin("file", "x.yaml", 17)


def test_typed_lists_need_no_kind_in_their_items() -> None:
    item = service()
    del item["kind"], item["apiVersion"]
    text = json.dumps({"apiVersion": "v1", "kind": "ServiceList", "metadata": {}, "items": [item]})
    assert [found.name for found in declare(text, "x").services] == ["default/web"]


def test_other_kinds_of_a_mixed_list_are_told() -> None:
    pod = {"apiVersion": "v1", "kind": "Pod"}
    knative = {"apiVersion": "serving.knative.dev/v1", "kind": "Service"}
    assert notes(pod, service(), pod, knative) == ["left out of the List: 2 Pod, 1 Service"]


def test_notes_name_file_and_line() -> None:
    declaration = declare("\n" + yaml.safe_dump(service(clusterIP="None")), "x.yaml")
    assert str(declaration.notes[0]).startswith("x.yaml:2: note: Service default/web left out: ")


KUBECTL = """\
apiVersion: v1
items:
- apiVersion: v1
  kind: Service
  metadata:
    annotations:
      kubectl.kubernetes.io/last-applied-configuration: |
        {"apiVersion":"v1","kind":"Service"}
    creationTimestamp: "2024-05-01T10:00:00Z"
    labels: {app: web}
    managedFields:
    - apiVersion: v1
      fieldsV1: {f:spec: {f:ports: {.: {}, 'k:{"port":80,"protocol":"TCP"}': {.: {}, f:port: {}}}}}
      manager: kubectl
    name: web
    namespace: shop
  spec:
    clusterIP: 10.96.7.7
    clusterIPs:
    - 10.96.7.7
    internalTrafficPolicy: Cluster
    ports:
    - port: 80
      protocol: TCP
      targetPort: 8080
    selector: {app: web}
    sessionAffinity: None
    type: ClusterIP
  status:
    loadBalancer: {}
- addressType: IPv4
  apiVersion: discovery.k8s.io/v1
  endpoints:
  - addresses:
    - 10.244.1.7
    conditions: {ready: true, serving: true, terminating: false}
    nodeName: node1
    targetRef: {kind: Pod, name: web-6c9d, namespace: shop}
    zone: a
  kind: EndpointSlice
  metadata:
    creationTimestamp: null
    labels:
      kubernetes.io/service-name: web
    name: web-x2x4z
    namespace: shop
  ports:
  - name: ""
    port: 8080
    protocol: TCP
kind: List
metadata:
  resourceVersion: ""
"""


def test_the_output_of_kubectl_is_read_as_it_is() -> None:
    declaration = declare(KUBECTL, "x.yaml")
    assert (declaration.problems, declaration.notes) == ((), ())
    ports, backends = (ServicePort(80, TCP, "", 8080),), (Backend("10.244.1.7", node="node1"),)
    assert declaration.services == (Service("shop/web", ("10.96.7.7",), ports, backends),)
