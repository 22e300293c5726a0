# SPDX-License-Identifier: Apache-2.0
#
# Installs kpng and winuserspace as Windows services of NSSM (nssm.cc). They replace a
# kube-proxy that NSSM runs. As an administrator:
#
#   .\nssm.ps1 -Install -Programs C:\k -Kubeconfig C:\k\config
#   .\nssm.ps1 -Uninstall
#
# -Dependent names services that depend on kube-proxy, such as antrea-agent.
param(
    [switch]$Install,
    [switch]$Uninstall,
    [string]$Programs = 'C:\k',
    [string]$Kubeconfig = 'C:\k\config',
    [string]$Logs = 'C:\var\log\kpng',
    [string]$Interface = 'vEthernet (HNS Internal NIC)',
    [string[]]$Dependent = @()
)
$ErrorActionPreference = 'Stop'
$nssm = (Get-Command nssm.exe).Source

# Runs nssm, and fails if it does.
function Invoke-Nssm {
    & $nssm @args
    if ($LASTEXITCODE -ne 0) { throw "nssm ${args}: status $LASTEXITCODE" }
}

# Creates a service whose output goes to files of at most 100 MB.
function Add-Program([string]$Name, [string]$Arguments) {
    Invoke-Nssm install $Name (Join-Path $Programs "$Name.exe") $Arguments
    Invoke-Nssm set $Name Start SERVICE_DELAYED_AUTO_START
    # Both log to standard error.
    Invoke-Nssm set $Name AppStdout (Join-Path $Logs "$Name.log")
    Invoke-Nssm set $Name AppStderr (Join-Path $Logs "$Name.log")
    Invoke-Nssm set $Name AppRotateFiles 1
    Invoke-Nssm set $Name AppRotateOnline 1
    Invoke-Nssm set $Name AppRotateBytes 104857600
    # Wait half a minute for connections to end before addresses are removed.
    Invoke-Nssm set $Name AppStopMethodConsole 45000
}

if ($Install) {
    New-Item -ItemType Directory -Force -Path $Logs | Out-Null
    foreach ($name in $Dependent) { Invoke-Nssm set $name DependOnService -kube-proxy }
    if (Get-Service kube-proxy -ErrorAction SilentlyContinue) {
        Invoke-Nssm stop kube-proxy
        Invoke-Nssm set kube-proxy Start SERVICE_DISABLED
    }
    # No flag: versions of PowerShell differ in how they quote a path within an argument.
    Add-Program kpng 'kube to-api'
    Invoke-Nssm set kpng AppEnvironmentExtra "KUBECONFIG=$Kubeconfig"
    Add-Program winuserspace '-v=4'
    Invoke-Nssm set winuserspace DependOnService kpng
    Invoke-Nssm set winuserspace AppEnvironmentExtra "INTERFACE_TO_ADD_SERVICE_IP=$Interface"
    Invoke-Nssm start kpng
    Invoke-Nssm start winuserspace
} elseif ($Uninstall) {
    # A missing or stopped service is not an error: an earlier uninstallation may have
    # stopped halfway.
    foreach ($name in 'winuserspace', 'kpng') {
        $service = Get-Service $name -ErrorAction SilentlyContinue
        if (-not $service) { continue }
        if ($service.Status -ne 'Stopped') { Invoke-Nssm stop $name }
        Invoke-Nssm remove $name confirm
    }
    # In case the program was killed.
    & (Join-Path $Programs 'winuserspace.exe') --cleanup
    if ($LASTEXITCODE -ne 0) { throw "winuserspace.exe --cleanup: status $LASTEXITCODE" }
} else {
    throw 'Give -Install or -Uninstall.'
}
