{{- /*
Where the agent's own NVML comes from, by kind of cluster. What a value says goes before its preset.
source: runtime or host; hostRoot: the driver root on the host; runtimeClass: of the agent's pods; devRoot: where the host has
its device nodes, where that is not the driver root; state: a folder whose files the host may execute; plain: containers get nodes and
driver by mounts where they cannot by CDI, since no runtime of NVIDIA's is there; kubelet: its root; cdi: where the runtime reads
specifications that are written while it runs; fixed: nothing below /etc can be made.
*/ -}}
{{- define "gna.presets" -}}
toolkit: {source: runtime, hostRoot: /, runtimeClass: "", meaning: "NVIDIA's container runtime is the nodes' default one"}
runtimeclass: {source: runtime, hostRoot: /, runtimeClass: nvidia, meaning: "NVIDIA's container runtime by RuntimeClass nvidia"}
k3s: {source: runtime, hostRoot: /, runtimeClass: nvidia, meaning: "k3s and RKE2 make RuntimeClass nvidia by themselves"}
operator: {source: runtime, hostRoot: /run/nvidia/driver, runtimeClass: nvidia, meaning: "NVIDIA's GPU operator with its driver container"}
aks: {source: runtime, hostRoot: /, runtimeClass: "", meaning: "AKS, whose GPU nodes have NVIDIA's runtime as the default one"}
gke: {source: host, hostRoot: /home/kubernetes/bin/nvidia, devRoot: /, state: /home/kubernetes/bin/gpu-node-agent, plain: true, runtimeClass: "", quota: true, meaning: "GKE with Google's driver installer"}
openshift: {source: host, hostRoot: /run/nvidia/driver, runtimeClass: "", openshift: true, meaning: "OpenShift with NVIDIA's GPU operator"}
bottlerocket: {source: runtime, hostRoot: /, runtimeClass: "", meaning: "Bottlerocket, whose runtime takes devices from a mount"}
talos: {source: runtime, hostRoot: /, runtimeClass: nvidia, cdi: /var/cdi/dynamic, fixed: true, meaning: "Talos with NVIDIA's system extensions"}
k0s: {source: runtime, hostRoot: /, runtimeClass: nvidia, kubelet: /var/lib/k0s/kubelet, meaning: "k0s, whose kubelet has a root of its own"}
microk8s: {source: runtime, hostRoot: /, runtimeClass: nvidia, kubelet: /var/snap/microk8s/common/var/lib/kubelet, meaning: "MicroK8s, whose kubelet has a root of its own"}
host: {source: host, hostRoot: /, runtimeClass: "", meaning: "the host's own driver, mounted; the agent is privileged"}
{{- end -}}

{{- /* The preset in force: its keys, its name, and what was seen of the cluster. */ -}}
{{- define "gna.preset" -}}
{{- $presets := include "gna.presets" . | fromYaml -}}
{{- $name := .Values.preset -}}
{{- $seen := "" -}}
{{- $more := dict -}}
{{- if eq $name "auto" -}}
{{- $name = "toolkit" -}}
{{- $seen = "no RuntimeClass nvidia and no ClusterPolicy was seen" -}}
{{- $policies := list -}}
{{- /* helm fails on a kind that the cluster does not know. */ -}}
{{- if .Capabilities.APIVersions.Has "nvidia.com/v1/ClusterPolicy" -}}
{{- $policies = dig "items" list (lookup "nvidia.com/v1" "ClusterPolicy" "" "" | default dict) -}}
{{- end -}}
{{- if lookup "node.k8s.io/v1" "RuntimeClass" "" "nvidia" -}}
{{- $name = "runtimeclass" -}}
{{- $seen = "RuntimeClass nvidia is there" -}}
{{- end -}}
{{- if $policies -}}
{{- $spec := dig "spec" dict (first $policies) -}}
{{- $name = "operator" -}}
{{- $seen = printf "ClusterPolicy %s of the GPU operator is there" (first $policies).metadata.name -}}
{{- if not (dig "driver" "enabled" true $spec) -}}
{{- $more = dict "hostRoot" "/" -}}
{{- $seen = printf "%s, without a driver container" $seen -}}
{{- end -}}
{{- if dig "cdi" "nriPluginEnabled" false $spec -}}
{{- $more = merge (dict "source" "host" "runtimeClass" "") $more -}}
{{- $seen = printf "%s, with its NRI plugin and so without RuntimeClasses" $seen -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- merge (dict "name" $name "seen" $seen) $more (get $presets $name) | toYaml -}}
{{- end -}}

{{- /* Whether the agent sees the host's process IDs: mode mps needs them, and by default whatever is measured by process. */ -}}
{{- define "gna.hostPID" -}}
{{- $enabled := toString .Values.attribution.enabled -}}
{{- $shared := .Values.vgpu.enabled -}}
{{- range dig "layouts" dict .Values.config -}}
{{- range . -}}
{{- if gt (int (.replicas | default 1)) 1 -}}{{- $shared = true -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- if or .Values.mps.enabled (eq $enabled "true") (and (eq $enabled "auto") $shared (not .Values.simulator.enabled)) }}true{{ end -}}
{{- end -}}

{{- define "gna.source" -}}
{{ default (include "gna.preset" . | fromYaml).source .Values.driver.source }}
{{- end -}}

{{- define "gna.hostRoot" -}}
{{ default (include "gna.preset" . | fromYaml).hostRoot .Values.driver.hostRoot }}
{{- end -}}

{{- /* On the host: a driver container has device nodes below its root, a plain node has them in /dev. */ -}}
{{- define "gna.devRoot" -}}
{{ coalesce .Values.driver.devRoot (include "gna.preset" . | fromYaml).devRoot (include "gna.hostRoot" .) }}
{{- end -}}

{{- /* On the host and in the agent's container, by one name: runtimes execute and mount what lies there. */ -}}
{{- define "gna.state" -}}
{{ coalesce .Values.host.state (include "gna.preset" . | fromYaml).state "/var/lib/gpu-node-agent" }}
{{- end -}}

{{- define "gna.kubeletRoot" -}}
{{ coalesce .Values.kubelet.root (include "gna.preset" . | fromYaml).kubelet "/var/lib/kubelet" }}
{{- end -}}

{{- define "gna.cdi" -}}
{{ coalesce .Values.host.cdi (include "gna.preset" . | fromYaml).cdi "/var/run/cdi" }}
{{- end -}}

{{- /* Of the agent's pods; the host's driver and simulated GPUs need none. */ -}}
{{- define "gna.runtimeClass" -}}
{{- if not (or .Values.simulator.enabled (include "gna.hostDriver" .)) -}}
{{ default (include "gna.preset" . | fromYaml).runtimeClass .Values.runtimeClassName }}
{{- end -}}
{{- end -}}

{{- define "gna.quota" -}}
{{- if or .Values.priorityClassQuota.enabled (include "gna.preset" . | fromYaml).quota }}true{{ end -}}
{{- end -}}

{{- define "gna.openshift" -}}
{{- if or .Values.openshift.enabled (include "gna.preset" . | fromYaml).openshift }}true{{ end -}}
{{- end -}}
