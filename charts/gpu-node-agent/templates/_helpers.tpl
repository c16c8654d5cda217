{{- define "gna.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "gna.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "gna.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Cluster-wide objects carry the namespace: two releases may have one name. */ -}}
{{- define "gna.clusterName" -}}
{{- printf "%s-%s" .Release.Namespace (include "gna.fullname" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "gna.selector" -}}
app.kubernetes.io/name: {{ include "gna.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "gna.labels" -}}
{{ include "gna.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "gna.account" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "gna.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "gna.user" -}}
system:serviceaccount:{{ .Release.Namespace }}:{{ include "gna.account" . }}
{{- end -}}

{{- define "gna.image" -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}

{{- define "gna.cleanupName" -}}
{{ include "gna.fullname" . }}-cleanup
{{- end -}}

{{- define "gna.preflightName" -}}
{{ include "gna.fullname" . }}-preflight
{{- end -}}

{{- /* Of the agents' pods. */ -}}
{{- define "gna.agentSelector" -}}
app.kubernetes.io/name={{ include "gna.name" . }},app.kubernetes.io/instance={{ .Release.Name }},app.kubernetes.io/component=agent
{{- end -}}

{{- /* The Secret in which helm keeps this revision. After a rollback it is the one that was rolled back to. */ -}}
{{- define "gna.releaseRecord" -}}
sh.helm.release.v1.{{ .Release.Name }}.v{{ .Release.Revision }}
{{- end -}}

{{- /* Whether instances are made: NVML's calls for that take the host's device nodes and its privilege. */ -}}
{{- define "gna.parts" -}}
{{- if and .Values.mig.enabled .Values.mig.manage (not .Values.simulator.enabled) }}true{{ end -}}
{{- end -}}

{{- define "gna.hostDriver" -}}
{{- if and (not .Values.simulator.enabled) (or .Values.mps.enabled (include "gna.parts" .) (eq (include "gna.source" .) "host")) }}true{{ end -}}
{{- end -}}

{{- /* The driver root as the agent sees it: the host's own root cannot be mounted at /. */ -}}
{{- define "gna.driverRoot" -}}
{{- if not (include "gna.hostDriver" .) -}}/
{{- else if eq (include "gna.hostRoot" .) "/" -}}/host
{{- else -}}{{ include "gna.hostRoot" . }}
{{- end -}}
{{- end -}}

{{- /* Whether the extender answers kube-scheduler over plain HTTP, too, where nobody has to show who he is. Only
       where the values say so. */ -}}
{{- define "gna.plainVerbs" -}}
{{- if dig "http" "verbs" false .Values.extender.config }}true{{ end -}}
{{- end -}}

{{- /* The account, and its Secret, by which this release's own monitors scrape the agents. */ -}}
{{- define "gna.scraperName" -}}
{{- if and .Values.metrics.access.secret (or .Values.metrics.podMonitor.enabled .Values.metrics.serviceMonitor.enabled) -}}
{{ include "gna.fullname" . }}-scraper
{{- end -}}
{{- end -}}

{{- /* Whether an agent without the host's root looks for further device nodes: of GDS, GDRCopy, RDMA, IMEX. */ -}}
{{- define "gna.companions" -}}
{{- $injection := .Values.config.injection | default dict -}}
{{- if and (or $injection.gds $injection.gdrcopy $injection.mofed $injection.imexChannels) (not .Values.simulator.enabled) (not (include "gna.hostDriver" .)) (eq (include "gna.hostRoot" .) "/") }}true{{ end -}}
{{- end -}}

{{- define "gna.writesChoice" -}}
{{- $vgpu := dig "vgpu" "writeChoice" true .Values.config -}}
{{- if or (and .Values.vgpu.enabled $vgpu) .Values.mps.enabled }}true{{ end -}}
{{- end -}}

{{- /* Whether limits of vGPU are enforced at all: what namespaces say of it is read. */ -}}
{{- define "gna.enforces" -}}
{{- $enforcement := dig "vgpu" "enforcement" "library" .Values.config -}}
{{- if and .Values.vgpu.enabled (ne (toString $enforcement) "off") (ne (toString $enforcement) "false") }}true{{ end -}}
{{- end -}}

{{- /* MPS daemons get a cgroup of their own, and the driver limits those of vGPU containers. */ -}}
{{- define "gna.cgroups" -}}
{{- if or .Values.mps.enabled (include "gna.enforces" .) }}true{{ end -}}
{{- end -}}

{{- define "gna.ends" -}}
{{- if and (include "gna.enforces" .) (eq (dig "vgpu" "aboveCap" "report" .Values.config) "end") }}true{{ end -}}
{{- end -}}

{{- /* Whether the agent's container has a capability for that: a privileged one has all. */ -}}
{{- define "gna.kills" -}}
{{- if and (include "gna.ends" .) (not (include "gna.hostDriver" .)) }}true{{ end -}}
{{- end -}}

{{- /* Resizing takes a policy that says who may ask for it. */ -}}
{{- define "gna.resizes" -}}
{{- if and .Values.vgpu.resizers (include "gna.enforces" .) (include "gna.policies" .) }}true{{ end -}}
{{- end -}}

{{- /* Name of the driver of claims, in DeviceClasses, slices and rights. */ -}}
{{- define "gna.draDriver" -}}gpu-node-agent.io{{- end -}}

{{- define "gna.nudges" -}}
{{- if and .Values.dra.enabled (dig "dra" "nudgePods" true .Values.config) }}true{{ end -}}
{{- end -}}

{{- define "gna.policies" -}}
{{- if semverCompare ">=1.30.0-0" .Capabilities.KubeVersion.Version }}true{{ end -}}
{{- end -}}

{{- /* The agent's configuration: what follows from other values, below what .config says. */ -}}
{{- define "gna.config" -}}
version: 1
modes:
  pgpu: {{ .Values.pgpu.enabled }}
  vgpu: {{ .Values.vgpu.enabled }}
  mps: {{ .Values.mps.enabled }}
  mig: {{ .Values.mig.enabled }}
{{- if .Values.mig.manage }}
mig:
  manage: true
{{- end }}
{{- if .Values.dra.enabled }}
dra:
  enabled: true
{{- end }}
cluster:
  access: required
  extender: {{ .Values.extender.enabled }}
http:
  port: {{ .Values.port }}
{{- if .Values.metrics.access.secret }}
https:
  port: {{ .Values.metrics.access.port }}
  certificate: /etc/gpu-node-agent-tls/tls.crt
  key: /etc/gpu-node-agent-tls/tls.key
{{- end }}
logging:
  format: json
kubelet:
  root: {{ include "gna.kubeletRoot" . | quote }}
  devicePlugins: {{ .Values.kubelet.devicePlugins | quote }}
driver:
  root: {{ include "gna.driverRoot" . | quote }}
{{- if or .Values.driver.devRoot (ne (include "gna.hostRoot" .) "/") }}
  devRoot: {{ include "gna.devRoot" . | quote }}
{{- end }}
{{- if .Values.simulator.enabled }}
simulator:
  profile: {{ .Values.simulator.profile | quote }}
defaultMode: {{ .Values.pgpu.enabled | ternary "pgpu" "vgpu" }}
{{- end }}
injection:
  {{- if not (include "gna.hostDriver" .) }}
  driverRoot: /driver-root
  {{- end }}
  hostDriverRoot: {{ include "gna.hostRoot" . | quote }}
  {{- if (include "gna.preset" . | fromYaml).plain }}
  deviceNodes: true
  driverMount: {{ include "gna.hostRoot" . | quote }}
  {{- end }}
host:
  state: {{ include "gna.state" . | quote }}
  cdi: {{ include "gna.cdi" . | quote }}
{{- if include "gna.cgroups" . }}
  cgroups: /host-cgroups
{{- end }}
{{- if include "gna.resizes" . }}
vgpu:
  resize: true
{{- end }}
{{- if not (include "gna.hostDriver" .) }}
# /dev/kmsg can be opened in privileged containers only.
health:
  kernelLog: null
{{- end }}
{{- end -}}

{{- define "gna.mergedConfig" -}}
{{- mergeOverwrite (include "gna.config" . | fromYaml) (deepCopy .Values.config) | toYaml -}}
{{- end -}}

{{- /* Without the keys that a running agent takes up by itself: only the others are worth a restart. */ -}}
{{- define "gna.restartDigest" -}}
{{- $all := include "gna.mergedConfig" . | fromYaml -}}
{{- omit $all "defaultMode" "layouts" "modes" "whenBusy" "unexplainedProcesses" "logging" | toYaml | sha256sum -}}
{{- end -}}

{{- /* All replicas of the extender, as a label selector in one line. */ -}}
{{- define "gna.extenderSelector" -}}
{{- $labels := list "app.kubernetes.io/component=extender" -}}
{{- range $key, $value := include "gna.selector" . | fromYaml }}{{ $labels = append $labels (printf "%s=%s" $key $value) }}{{ end -}}
{{- join "," $labels }}
{{- end -}}
