{{- /* What the agent's pods and the clean-up's have in common: both do the same things to the same node. */ -}}

{{- define "gna.placement" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "gna.affinity" . }}
affinity:
  {{- . | nindent 2 }}
{{- end }}
tolerations:
  # The agent's own: an agent that was killed during a switch has left it, and the next one removes it.
  - {key: gpu-node-agent.io/switching, operator: Exists, effect: NoSchedule}
  {{- with .Values.tolerations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with include "gna.runtimeClass" . }}
runtimeClassName: {{ . }}
{{- end }}
{{- if .Values.hostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- if include "gna.hostPID" . }}
hostPID: true
{{- end }}
{{- end -}}

{{- define "gna.securityContext" -}}
runAsUser: 0
runAsGroup: 0
readOnlyRootFilesystem: true
{{- if include "gna.hostDriver" . }}
privileged: true
{{- else }}
privileged: false
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
  {{- if include "gna.kills" . }}
  # To end containers above their cap, also with processes of other users.
  add: [KILL]
  {{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end }}
{{- end -}}

{{- define "gna.env" -}}
# For every command that is run in this container, by hand too.
- name: GPU_NODE_AGENT_CONFIG
  value: /etc/gpu-node-agent/config.yaml
- name: GPU_NODE_AGENT_CLUSTER_NODE_NAME
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
{{- if not (or .Values.simulator.enabled (include "gna.hostDriver" .)) }}
# For NVIDIA's container runtime: all GPUs, and the driver's files for NVML.
- name: NVIDIA_VISIBLE_DEVICES
  value: all
- name: NVIDIA_DRIVER_CAPABILITIES
  value: utility
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "gna.mounts" -}}
- name: config
  mountPath: /etc/gpu-node-agent
  readOnly: true
- name: tmp
  mountPath: /tmp
- name: device-plugins
  mountPath: {{ .Values.kubelet.devicePlugins }}
  readOnly: true
- name: plugins-registry
  mountPath: {{ include "gna.kubeletRoot" . }}/plugins_registry
- name: pod-resources
  mountPath: {{ include "gna.kubeletRoot" . }}/pod-resources
{{- if and .Values.dra.enabled (include "gna.hostDriver" .) }}
# Only where the agent is privileged anyway: the kubelet's record of claims is replaced as a file, and lies there.
- name: kubelet
  mountPath: {{ include "gna.kubeletRoot" . }}
  # Volumes of pods are mounts below it: what the kubelet unmounts must go here, too, or it stays in use.
  mountPropagation: HostToContainer
  readOnly: true
{{- end }}
- name: state
  mountPath: {{ include "gna.state" . }}
- name: run
  mountPath: /run/gpu-node-agent
  {{- if .Values.mps.enabled }}
  # The shared memory of each MPS daemon is a mount made here that pods must see.
  mountPropagation: Bidirectional
  {{- end }}
- name: cdi
  mountPath: {{ include "gna.cdi" . }}
{{- if not (include "gna.preset" . | fromYaml).fixed }}
- name: cdi-static
  mountPath: /etc/cdi
  readOnly: true
{{- end }}
{{- if not (or .Values.simulator.enabled (include "gna.hostDriver" .)) }}
# All GPUs, for runtimes that take no variable from containers without privilege (Bottlerocket); others ignore it.
- name: all-gpus
  mountPath: /var/run/nvidia-container-devices/all
  readOnly: true
{{- end }}
{{- if include "gna.hostDriver" . }}
- name: driver
  mountPath: {{ include "gna.driverRoot" . }}
  mountPropagation: HostToContainer
  {{- if not .Values.mps.enabled }}
  readOnly: true
  {{- end }}
{{- else if not .Values.simulator.enabled }}
# Where the driver's files are on the host, for the CDI specification: NVIDIA's runtime shows some of them only.
- name: driver-files
  {{- if eq (include "gna.hostRoot" .) "/" }}
  mountPath: /driver-root/usr
  {{- else }}
  mountPath: /driver-root
  mountPropagation: HostToContainer
  {{- end }}
  readOnly: true
{{- end }}
{{- if include "gna.parts" . }}
# Nodes by which the driver knows who may make instances, and those of instances that come later.
- name: nvidia-caps
  mountPath: /dev/nvidia-caps
{{- end }}
{{- if include "gna.companions" . }}
# To be seen: without privilege none of them can be opened.
- name: devices
  mountPath: /driver-root/dev
  mountPropagation: HostToContainer
  readOnly: true
- name: udev
  mountPath: /driver-root/run/udev
  readOnly: true
{{- end }}
{{- if include "gna.cgroups" . }}
- name: cgroups
  mountPath: /host-cgroups
  {{- if not .Values.mps.enabled }}
  # The driver is given the names of cgroups in it; nothing is written there.
  readOnly: true
  {{- end }}
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "gna.volumes" -}}
- name: config
  configMap:
    name: {{ include "gna.fullname" . }}{{ include "gna.poolSuffix" . }}
- name: tmp
  emptyDir: {medium: Memory, sizeLimit: 16Mi}
- name: device-plugins
  hostPath: {path: {{ .Values.kubelet.devicePlugins | quote }}, type: Directory}
- name: plugins-registry
  hostPath: {path: {{ printf "%s/plugins_registry" (include "gna.kubeletRoot" .) | quote }}, type: Directory}
- name: pod-resources
  hostPath: {path: {{ printf "%s/pod-resources" (include "gna.kubeletRoot" .) | quote }}, type: Directory}
{{- if and .Values.dra.enabled (include "gna.hostDriver" .) }}
- name: kubelet
  hostPath: {path: {{ include "gna.kubeletRoot" . | quote }}, type: Directory}
{{- end }}
- name: state
  hostPath: {path: {{ include "gna.state" . | quote }}, type: DirectoryOrCreate}
- name: run
  hostPath: {path: /run/gpu-node-agent, type: DirectoryOrCreate}
- name: cdi
  hostPath: {path: {{ include "gna.cdi" . | quote }}, type: DirectoryOrCreate}
{{- if not (include "gna.preset" . | fromYaml).fixed }}
- name: cdi-static
  hostPath: {path: /etc/cdi, type: DirectoryOrCreate}
{{- end }}
{{- if not (or .Values.simulator.enabled (include "gna.hostDriver" .)) }}
- name: all-gpus
  hostPath: {path: /dev/null}
{{- end }}
{{- if include "gna.hostDriver" . }}
- name: driver
  hostPath: {path: {{ include "gna.hostRoot" . | quote }}, type: Directory}
{{- else if not .Values.simulator.enabled }}
- name: driver-files
  hostPath: {path: {{ eq (include "gna.hostRoot" .) "/" | ternary "/usr" (include "gna.hostRoot" .) | quote }}}
{{- end }}
{{- if include "gna.parts" . }}
- name: nvidia-caps
  hostPath: {path: /dev/nvidia-caps, type: DirectoryOrCreate}
{{- end }}
{{- if include "gna.companions" . }}
- name: devices
  hostPath: {path: /dev, type: Directory}
- name: udev
  hostPath: {path: /run/udev, type: DirectoryOrCreate}
{{- end }}
{{- if include "gna.cgroups" . }}
- name: cgroups
  hostPath: {path: /sys/fs/cgroup, type: Directory}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}
