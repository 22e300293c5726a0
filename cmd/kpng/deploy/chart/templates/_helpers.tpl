{{- /* SPDX-License-Identifier: Apache-2.0 */ -}}

{{- /* The image. The chart of a release has the digests of the images of this release. */ -}}
{{- define "kpng.image" -}}
{{- $image := .Values.image -}}
{{- $name := get (dict "iptables" "kpng-iptables" "kernelspace" "kpng-windows") .Values.backend | default "kpng" -}}
{{- $image.repository | default $name -}}
{{- if $image.digest }}@{{ $image.digest }}
{{- else if $image.tag }}:{{ $image.tag }}
{{- else }}:{{ .Chart.AppVersion }}
{{- with get (.Files.Get "files/digests.yaml" | fromYaml) $name }}@{{ . }}{{ end }}
{{- end }}
{{- end -}}

{{- /* The labels of all objects. */ -}}
{{- define "kpng.labels" -}}
app.kubernetes.io/name: {{ .Release.Name }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* The arguments that select the backend and the services. */ -}}
{{- define "kpng.args" -}}
- kube
- to-local
- {{ .Values.backend }}
{{- if .Values.kubeProxy.configMap }}
- --config=/var/lib/kube-proxy/config.conf
{{- end }}
{{- with .Values.serviceProxyName }}
- --service-proxy-name={{ . }}
{{- end }}
{{- end -}}

{{- /* The environment of the containers. */ -}}
{{- define "kpng.env" -}}
{{- if eq .Values.backend "kernelspace" }}
- name: KUBE_NETWORK
  value: {{ .Values.hnsNetwork | quote }}
{{- end }}
- name: NODE_NAME
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
{{- $host := .Values.apiServer.host }}
{{- if not (or $host .Values.serviceProxyName .Values.kubeProxy.configMap) }}
{{- fail "set apiServer.host to an address of the API server that works without a service proxy" }}
{{- end }}
{{- with $host }}
- name: KUBERNETES_SERVICE_HOST
  value: {{ . | quote }}
- name: KUBERNETES_SERVICE_PORT
  value: {{ $.Values.apiServer.port | quote }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* The mounted volumes. */ -}}
{{- define "kpng.mounts" -}}
{{- if eq .Values.backend "iptables" }}
- name: lock
  mountPath: /run/xtables.lock
{{- else if eq .Values.backend "ebpf" }}
- name: bpf
  mountPath: /node/bpf
- name: cgroup
  mountPath: /node/cgroup
  readOnly: true
{{- end }}
{{- if .Values.kubeProxy.configMap }}
- name: kube-proxy
  mountPath: /var/lib/kube-proxy
  readOnly: true
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* The volumes. */ -}}
{{- define "kpng.volumes" -}}
{{- if eq .Values.backend "iptables" }}
# The lock that all programs of iptables on the node share.
- name: lock
  hostPath:
    path: /run/xtables.lock
    type: FileOrCreate
{{- else if eq .Values.backend "ebpf" }}
- name: bpf
  hostPath: {path: /sys/fs/bpf, type: Directory}
- name: cgroup
  hostPath: {path: /sys/fs/cgroup, type: Directory}
{{- end }}
{{- if eq .Values.task "cleanup-kube-proxy" }}
- name: xtables-lock
  hostPath: {path: /run/xtables.lock, type: FileOrCreate}
- name: modules
  hostPath: {path: /lib/modules}
{{- end }}
{{- with .Values.kubeProxy.configMap }}
- name: kube-proxy
  configMap:
    name: {{ . }}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* The port of an address. */ -}}
{{- define "kpng.port" -}}
{{ splitList ":" . | last }}
{{- end -}}

{{- /* The address of the health checks. Those of the other proxy are at port 10256. */ -}}
{{- define "kpng.healthz" -}}
{{ .Values.healthzBindAddress | default (ternary "127.0.0.1:10356" "0.0.0.0:10256" (ne .Values.serviceProxyName "")) }}
{{- end -}}

{{- /* The address of the metrics. */ -}}
{{- define "kpng.metrics" -}}
{{ .Values.metricsBindAddress | default (ternary "127.0.0.1:10349" "127.0.0.1:10249" (ne .Values.serviceProxyName "")) }}
{{- end -}}

{{- /* The name of the instance, which must differ from that of another kpng on the node. */ -}}
{{- define "kpng.instance" -}}
{{ .Values.instance | default (ternary "beside" "" (ne .Values.serviceProxyName "")) }}
{{- end -}}

{{- /* What kpng may do in its container on Linux. */ -}}
{{- define "kpng.securityContext" -}}
securityContext:
  # root, because only root can use a capability in a container, but root
  # without any other capability. Resets of connections need NET_RAW.
  runAsUser: 0
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
    {{- if eq .Values.backend "ebpf" }}
    add: [BPF, NET_ADMIN, NET_RAW, PERFMON]
    {{- else }}
    add: [NET_ADMIN, NET_RAW]
    {{- end }}
  seccompProfile:
    type: RuntimeDefault
{{- end -}}

{{- /* The flags for the backend ebpf, which are the same for the proxy and tasks. */ -}}
{{- define "kpng.ebpfFlags" -}}
{{- if eq .Values.backend "ebpf" -}}
- --bpffs=/node/bpf
- --cgroup=/node/cgroup
{{- end }}
{{- end -}}

{{- /* The containers of a task. Init containers do it, one after the other. */ -}}
{{- define "kpng.task" -}}
{{- if or (eq .Values.backend "kernelspace") .Values.serviceProxyName -}}
{{- fail "tasks are for Linux nodes, and for kpng in place of kube-proxy" }}
{{- end -}}
initContainers:
{{- if eq .Values.task "check" }}
- name: task
  {{- include "kpng.taskContainer" . | nindent 2 }}
  args:
  - check
  - {{ .Values.backend }}
  {{- if .Values.kubeProxy.configMap }}
  - --config=/var/lib/kube-proxy/config.conf
  {{- end }}
  {{- with include "kpng.ebpfFlags" . }}
  {{- . | nindent 2 }}
  {{- end }}
{{- else if eq .Values.task "cleanup" }}
- name: wait
  {{- include "kpng.taskContainer" . | nindent 2 }}
  args: [wait, kube-proxy]
- name: task
  {{- include "kpng.taskContainer" . | nindent 2 }}
  args:
  - cleanup
  - {{ .Values.backend }}
  {{- with include "kpng.instance" . }}
  - --instance={{ . }}
  {{- end }}
  {{- with include "kpng.ebpfFlags" . }}
  {{- . | nindent 2 }}
  {{- end }}
{{- else }}
- name: wait
  {{- include "kpng.taskContainer" . | nindent 2 }}
  args: [wait, kpng, "--address=127.0.0.1:{{ include "kpng.port" (include "kpng.healthz" .) }}"]
- name: task
  image: {{ required "set kubeProxy.image to the image of the DaemonSet kube-proxy" .Values.kubeProxy.image }}
  imagePullPolicy: IfNotPresent
  command: [kube-proxy, --cleanup]
  securityContext:
    privileged: true # as the DaemonSet kube-proxy
  volumeMounts:
  - name: xtables-lock
    mountPath: /run/xtables.lock
  - name: modules
    mountPath: /lib/modules
    readOnly: true
{{- end }}
containers:
- name: complete
  image: {{ .Values.pauseImage }}
  resources:
    requests: {cpu: 1m, memory: 1Mi}
  securityContext:
    runAsUser: 65535
    runAsNonRoot: true
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: {drop: [ALL]}
    seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "kpng.taskContainer" -}}
image: {{ include "kpng.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
env:
{{- include "kpng.env" . | trim | nindent 0 }}
{{ include "kpng.securityContext" . }}
{{- with include "kpng.mounts" . | trim }}
volumeMounts:
{{- . | nindent 0 }}
{{- end }}
{{- end -}}
